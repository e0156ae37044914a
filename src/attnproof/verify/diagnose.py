"""placeholder"""


def diagnose(*args):
    return ""
