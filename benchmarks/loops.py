"""Generation as the published loops do it in plain PyTorch, to set Mosaic's tokens per second beside.

What they do is kept: LLaDA forwards the whole canvas, takes the logits of every row, their softmax in the model's dtype and,
at a temperature, float64 noise; Fast-dLLM keeps keys and values of a block's first pass; SDAR prefills, extends each layer's
cache by `torch.cat`, takes the logits of all rows of the block, and runs one more pass to store a finished block. One
sequence. Defects that only break are left out: candidates are the open positions, and ties go to the lower row. Legend:
T tokens of a window, N canvas, V vocabulary, K KV heads, P keys kept, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench.baselines import Attention, Transformer
from benchmarks.bench.meters import synchronise
from mosaic.decoding.canvas import whole_blocks
from mosaic.decoding.llada import counts, schedule
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig

__all__ = ["LOOPS", "PlainModel", "Tally", "generate_plainly", "sdar_decides"]

Cache: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values [1, K, P, H] of every layer."""


@dataclass(slots=True)
class Tally:
    """The cost of a generation.

    Attributes
    ----------
    passes, tokens, rows
        Forward passes, the tokens they forwarded, and the rows whose logits they computed.
    layers_s, head_s
        Seconds in the layers, and in logits, confidences and the choice of rows; where they are measured.
    """

    passes: int = 0
    tokens: int = 0
    rows: int = 0
    layers_s: float = 0.0
    head_s: float = 0.0


@dataclass(slots=True)
class PlainModel:
    """A `Transformer` as a loop calls it, whole or over a cache.

    Parameters
    ----------
    network
        With its weights.
    split
        Wait for the device after the layers and after the head, to time them apart: the whole then takes longer.
    grouped
        Leave it to PyTorch's attention that query heads share keys, instead of repeating these as published.
    """

    network: Transformer
    split: bool = False
    grouped: bool = False
    tally: Tally = field(default_factory=Tally)

    @property
    def device(self) -> torch.device:
        """The places of the weights."""
        return self.network.embedding.device

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the body to the tally, if they are asked for."""
        if not self.split:
            yield
            return
        cuda = self.device.type == "cuda"
        synchronise(cuda)
        began = perf_counter()
        yield
        synchronise(cuda)
        setattr(self.tally, name, getattr(self.tally, name) + perf_counter() - began)

    def layers(
        self,
        ids: Tensor,
        start: int = 0,
        cache: Cache | None = None,
        *,
        replace: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """Run a window int64 [1, T] that begins at `start`; return hidden states [1, T, D] and the keys that were seen.

        Parameters
        ----------
        cache
            Keys and values before the window; with `replace` of the whole canvas, where the window's own are written.
        """
        network, end = self.network, start + ids.shape[1]
        self.tally.passes += 1
        self.tally.tokens += ids.shape[1]
        seen: Cache = []
        with self.timed("layers_s"):
            x = F.embedding(ids, network.embedding)
            angles = network.angles(end, start)
            for number, layer in enumerate(network.layers):
                past = cache[number] if cache is not None else None
                normed = layer.attention_norm(x)  # type: ignore[operator]
                y, kept = _attend(layer.attention, normed, angles, past, start, replace, mask, self.grouped)  # type: ignore[arg-type]
                seen.append(kept)
                x = x + y
                x = x + layer.ffn(layer.ffn_norm(x))  # type: ignore[operator]
        return x, seen

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] of all rows of hidden states [1, T, D]; shifted models' are copied a row down."""
        self.tally.rows += hidden.shape[1]
        logits: Tensor = self.network.head(self.network.norm(hidden))[0]
        return torch.cat([logits[:1], logits[:-1]]) if self.network.arch.shifted else logits


def _attend(
    attention: Attention, x: Tensor, angles: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, start: int,
    replace: bool, mask: Tensor | None, grouped: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Attend over kept keys and the window's own; return them all."""
    arch, shape = attention.arch, (*x.shape[:-1], -1, attention.arch.attention.head_size)
    q, k, v = (part(x).view(shape) for part in (attention.q, attention.k, attention.v))
    if attention.norms:
        q, k = attention.norms[0](q), attention.norms[1](k)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    q, k = attention.rotated(q, *angles), attention.rotated(k, *angles)
    if past is not None and replace:
        for kept, new in zip(past, (k, v), strict=True):
            kept[:, :, start : start + x.shape[1]] = new
        k, v = past
    elif past is not None:
        k, v = (torch.cat([kept, new], dim=2) for kept, new in zip(past, (k, v), strict=True))
    keys, values = k, v
    if arch.attention.kv_heads < arch.attention.heads and not grouped:
        keys, values = (
            part.repeat_interleave(arch.attention.heads // arch.attention.kv_heads, dim=1) for part in (k, v)
        )
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
    projected: Tensor = attention.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))
    return projected, (k, v)


# --- sampling -------------------------------------------------------------------------------------------------------------


def _gumbel_argmax(logits_TV: Tensor, temperature: float) -> Tensor:
    """LLaDA's draw: the largest exp(l) / (-log u)^temperature, in float64."""
    if not temperature:
        return logits_TV.argmax(-1)
    wide = logits_TV.double()
    noise = (-torch.rand_like(wide).log()) ** temperature
    return (wide.exp() / noise).argmax(-1)


def _best(scores: Tensor, open_: Tensor, count: int) -> Tensor:
    """Bool [T]: the `count` highest scores of the open rows."""
    order = scores.masked_fill(~open_, float("-inf")).sort(descending=True, stable=True).indices[:count]
    return torch.zeros_like(open_).index_fill_(0, order, True) & open_


# --- loops ----------------------------------------------------------------------------------------------------------------


def _canvas(model: PlainModel, prompt: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Token ids [1, N], and bool [N] where they are to be decided."""
    ids = torch.full((1, length), model.network.arch.mask_token_id, device=model.device)
    ids[0, : prompt.numel()] = prompt.to(model.device)
    return ids, torch.arange(length, device=model.device) >= prompt.numel()


def llada(model: PlainModel, prompt: Tensor, config: GenerationConfig) -> Tensor:
    """Decode as LLaDA: low-confidence remasking over the whole canvas, with guidance where it is asked for."""
    block, length = config.block_length or 0, prompt.numel() + config.gen_length
    ids, open_ = _canvas(model, prompt, length)
    hidden = ids.clone()
    for start in range(prompt.numel(), length, block):
        for quota in counts(config):
            x, _ = model.layers(ids)
            if config.cfg_scale:
                hidden[0, prompt.numel() :] = ids[0, prompt.numel() :]
                hidden[0, : prompt.numel()] = model.network.arch.mask_token_id
                other, _ = model.layers(hidden)
            with model.timed("head_s"):
                logits = model.logits(x)
                if config.cfg_scale:
                    plain = model.logits(other)
                    logits = plain + (config.cfg_scale + 1) * (logits - plain)
                token = _gumbel_argmax(logits, config.temperature)
                confidence = logits.softmax(-1).gather(-1, token[:, None])[:, 0]
                confidence[start + block :] = float("-inf")
                window = open_ & (torch.arange(length, device=model.device) < start + block)
                chosen = _best(confidence, window, quota)
                ids[0] = torch.where(chosen, token, ids[0])
                open_ &= ~chosen
    return ids[0, prompt.numel() :].cpu()


def fast_dllm(model: PlainModel, prompt: Tensor, config: GenerationConfig) -> Tensor:
    """Decode as Fast-dLLM on LLaDA: all rows over the threshold at once; no cache, or the block's first pass as one."""
    block, length = config.block_length or 0, prompt.numel() + config.gen_length
    ids, open_ = _canvas(model, prompt, length)
    for start in range(prompt.numel(), length, block):
        mine, cache, first = slice(start, start + block), None, 0
        end = length
        while bool(open_[mine].any()):
            x, kept = model.layers(
                ids[:, first:end], first, cache, replace=config.cache == "dual" and cache is not None
            )
            with model.timed("head_s"):
                logits = model.logits(x)
                token = _gumbel_argmax(logits, config.temperature)
                confidence = logits.double().softmax(-1).gather(-1, token[:, None])[:, 0]
                rows = slice(start - first, start - first + block)
                window, scores = open_[mine], confidence[rows]
                chosen = _best(scores, window, 1) | (window & (scores >= (config.threshold or 1.0)))
                ids[0, mine] = torch.where(chosen, token[rows], ids[0, mine])
                open_[mine] &= ~chosen
            if config.cache and cache is None:
                whole = config.cache == "dual"
                cache = kept if whole else [(k[:, :, :start], v[:, :, :start]) for k, v in kept]
                first, end = start, start + block if whole else length
    return ids[0, prompt.numel() :].cpu()


def sdar(model: PlainModel, prompt: Tensor, config: GenerationConfig) -> Tensor:
    """Decode as SDAR: block after block over a cache of exact keys, by confidence; one more pass stores a finished block."""
    block, (prefix, length) = config.block_length or 0, whole_blocks(config, prompt.numel())
    ids, open_ = _canvas(model, prompt, length)
    cache: Cache | None = None
    if prefix:
        _, cache = model.layers(ids[:, :prefix], mask=model.network.mask(prefix))
    for start, end in pairwise(range(prefix, length + 1, block)):
        mine = slice(start, end)
        for quota in schedule(block, config.steps or block):
            x, _ = model.layers(ids[:, mine], start, cache)
            sdar_decides(model, x, ids[0, mine], open_[mine], quota, config)
            if not bool(open_[mine].any()):
                break
        _, cache = model.layers(ids[:, mine], start, cache)
    return ids[0, prompt.numel() : prompt.numel() + config.gen_length].cpu()


def sdar_decides(
    model: PlainModel, hidden: Tensor, ids: Tensor, open_: Tensor, quota: int, config: GenerationConfig
) -> None:
    """Decide rows of a block by their hidden states [1, T, D], in place: token ids int64 [T], and bool [T] where they are open."""
    with model.timed("head_s"):
        probability = _cut(model.logits(hidden), config).softmax(-1)
        token = probability.argmax(-1) if not config.temperature else probability.multinomial(1)[:, 0]
        confidence = probability.gather(-1, token[:, None])[:, 0]
        chosen = _sdar_rows(confidence, open_, quota, config)
        ids.copy_(torch.where(chosen, token, ids))
        open_ &= ~chosen


def _cut(logits_TV: Tensor, config: GenerationConfig) -> Tensor:
    """Logits at the temperature, -inf where top-k drops a token."""
    scaled = logits_TV / config.temperature if config.temperature else logits_TV
    if config.top_k:
        least = scaled.topk(config.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    return scaled


def _sdar_rows(confidence: Tensor, open_: Tensor, quota: int, config: GenerationConfig) -> Tensor:
    if config.remasking == "sequential":
        return open_ & (open_.cumsum(0) <= quota)
    high = open_ & (confidence > (config.threshold or 0.0))
    if config.remasking == "low_confidence_dynamic" and int(high.sum()) >= quota:
        return high
    return _best(confidence, open_, quota)


LOOPS: Final[Mapping[str, Callable[[PlainModel, Tensor, GenerationConfig], Tensor]]] = {
    "llada": llada,
    "fast-dllm": fast_dllm,
    "sdar": sdar,
}
"""The published loops that are here, by the name of their algorithm."""


def generate_plainly(model: PlainModel, prompt: Tensor, config: GenerationConfig) -> Tensor:
    """Generate an answer int64 [gen_length] to a prompt int64 [P] by the published loop of a resolved config.

    Raises
    ------
    UsageError
        If the algorithm is not among `LOOPS`, or an option is not in its loop.
    """
    loop = LOOPS.get(str(config.algorithm))
    left_out = {
        "cache": config.cache is not None and config.algorithm == "llada",
        "factor": config.factor is not None,
        "top_p": (config.top_p or 1.0) < 1.0,
        "remasking": config.remasking == "random",
        "shifted": model.network.arch.shifted,
    }
    if loop is None or any(left_out.values()):
        why = [name for name, found in left_out.items() if found]
        raise UsageError(
            f"no plain loop for '{config.algorithm}'{' with ' + ', '.join(why) if why else ''}; there are "
            f"{', '.join(LOOPS)}, at their published options."
        )
    with torch.no_grad():
        return loop(model, prompt, config)
