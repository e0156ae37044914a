"""placeholder"""


def render(document):
    return "<!doctype html><title>attnproof</title>"
