"""Mistakes in the kernel itself, as edits of the streaming kernel and its pieces.

Each was made by somebody: dropped rescales, masks of zero, fillers that are finite, off-by-one windows, tiles that are
skipped or read twice, heads that share the wrong keys, gradients that forget a factor.
"""

from __future__ import annotations

from attnproof.verify.mutants.addressing import ADDRESSING
from attnproof.verify.mutants.gradients import GRADIENTS
from attnproof.verify.mutants.masking import MASKING
from attnproof.verify.mutants.recurrence import RECURRENCE
from attnproof.verify.mutants.scoring import SCORING

SOURCE_OPERATORS = (*RECURRENCE, *MASKING, *ADDRESSING, *SCORING, *GRADIENTS)
