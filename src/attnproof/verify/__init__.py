"""The proof chain: judge any attention kernel against float64, and prove that the judge is sharp.

`cases` names the inputs, `inputs` makes them, `oracle` knows the right answer and how far a correct kernel may be
from it, `judge` compares, `candidate` loads what is judged, `guards` catch what numbers alone do not, `suite` runs it
all, `mutants` measure how much the whole catches, `records` keep what was found.
"""
