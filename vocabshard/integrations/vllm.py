"""vLLM's LogitsProcessor and Sampler in one, from hidden states and the sharded head: no logits are gathered.

    sampler = HeadSampler(model.lm_head, model.logits_processor, tp_group)
    sampler_output = sampler(hidden_states, sampling_metadata)

It reads attributes and imports nothing of vLLM, but for the classes of its results where vLLM is loaded already.
docs/integrations/vllm.md has the table of what is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vocabshard import checks, together
from vocabshard.checks import MOST_BEST
from vocabshard.functional import linear_logp
from vocabshard.options import LogpOutput
from vocabshard.sample import vocab_parallel_sample
from vocabshard.sampling import GREEDY_BELOW, SamplingProgram

T = TypeVar("T")
MODES = ("raw_logprobs", "processed_logprobs")
GREEDY = SamplingProgram.of(temperature=0.0)


class LogprobsTensors(NamedTuple):
    """vLLM's, by the names of its fields."""

    logprob_token_ids: Tensor  # int32 [N, n + 1], the sampled token first
    logprobs: Tensor  # fp32 [N, n + 1]
    selected_token_ranks: Tensor  # int64 [N], from 1


class SamplerOutput(NamedTuple):
    """vLLM's, by the names of its fields."""

    sampled_token_ids: Tensor  # int32 [N, 1]
    logprobs_tensors: LogprobsTensors | None


class _Rows(NamedTuple):
    """Rows of a batch that are drawn alike, and how."""

    which: Tensor | None  # None: all
    program: SamplingProgram


class _Scores(NamedTuple):
    """fp32 [N], [N, n], int64 [N, n], [N]."""

    logp: Tensor
    top_logp: Tensor
    top_ids: Tensor
    rank: Tensor


class HeadSampler:
    """Samples tokens, and scores them, straight from hidden states; the same on every rank of the group.

    Args:
        lm_head: vLLM's ParallelLMHead (or what has its attributes): `weight` [V_local, D] (unquantised),
            `org_vocab_size`, `num_embeddings_padded`.
        logits_processor: of it `soft_cap` and `scale` are read; None: neither.
        tp_group: the tensor-parallel ProcessGroup (`get_tp_group().device_group`); None is this process alone.
        logprobs_mode: "raw_logprobs": under the head as it is; "processed_logprobs": under temperature and truncation.
        seed: of the noise of requests without a seed of their own. The same on every rank.
        validate: True: each call's ranks first agree that none refuses it, so that all raise. It synchronises.
        options: `backend`, `strict` of `linear_logp`.

    Collectives: those of `vocab_parallel_sample` for each set of rows with parameters of their own, and with raw
    log-probs those of `linear_logp` once.

    Determinism: a token depends on its row's hidden state and key alone, and on the noise's seed; log-probs have the
    contract's bytes. Raises NotImplementedError naming what vLLM's Sampler does and this does not.
    """

    def __init__(
        self,
        lm_head: Any,
        logits_processor: Any = None,
        tp_group: Any = None,
        *,
        logprobs_mode: str = "raw_logprobs",
        seed: int = 0,
        validate: bool = False,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - {"backend", "strict"})
        if unknown:
            raise TypeError(f"HeadSampler: unknown option {unknown[0]!r}; expected backend or strict")
        if getattr(lm_head, "num_added_embeddings", 0):
            raise NotImplementedError("lm_head has added (LoRA) rows, whose ids are not in order: not supported")
        if not isinstance(getattr(lm_head, "weight", None), Tensor):
            raise NotImplementedError("lm_head has no weight tensor: a quantised head is not supported")
        self._lm_head, self._seed = lm_head, seed
        self._mode, self._step, self._validate = _mode(logprobs_mode), 0, validate
        self.scale = float(getattr(logits_processor, "scale", 1.0))
        if not self.scale > 0:
            raise NotImplementedError(f"logits_processor.scale must be positive, got {self.scale}")
        self._head: dict[str, Any] = {
            "tp_group": tp_group,
            "global_vocab_size": lm_head.num_embeddings_padded,
            "real_vocab_size": lm_head.org_vocab_size,
            "softcap": getattr(logits_processor, "soft_cap", None),
            "validate": False,
            **options,
        }

    def __call__(
        self,
        hidden_states: Tensor,
        sampling_metadata: Any,
        embedding_bias: Tensor | None = None,
        *,
        logprobs_mode_override: str | None = None,
        row_keys: Tensor | None = None,
    ) -> Any:
        """hidden_states [N, D], a row a request (those at `logits_indices`) -> SamplerOutput.

        row_keys: int64 [N], what tells a row's noise from another's. By default the number of the call and of the row;
        a request with a generator takes a key from it, so that its tokens do not depend on the batch.
        """
        of = sampling_metadata
        wanted, ids = of.max_num_logprobs, getattr(of, "logprob_token_ids", None)

        def check() -> str:
            mode = _mode(logprobs_mode_override) if logprobs_mode_override else self._mode
            _refuse(of)
            if wanted is not None:
                _few("max_num_logprobs", wanted)
            if ids and mode != "raw_logprobs":
                raise NotImplementedError('logprob_token_ids with "processed_logprobs" is not supported')
            if self._validate:
                self._check_rows(hidden_states, embedding_bias, row_keys)
            return mode

        stated = (logprobs_mode_override or self._mode, wanted, sorted((ids or {}).items()))
        mode = self._agreed(check, hidden_states, lambda: (*stated, list(hidden_states.shape)))
        count = hidden_states.shape[0]
        keys = self._keys(count, of.generators, hidden_states.device) if row_keys is None else row_keys
        best = None if wanted is None else max(wanted, 1)
        processed = best if mode == "processed_logprobs" and not ids else None
        tokens, scores = self._draw(hidden_states, embedding_bias, of, keys, processed)
        if (best is not None and processed is None) or ids:
            scores = self._raw(hidden_states, embedding_bias, tokens, best or 1)
        tensors = None
        if ids and scores is not None:
            tensors = self._chosen(hidden_states, embedding_bias, tokens, ids, scores)
        elif scores is not None:
            tensors = _tensors(tokens, scores, wanted)
        output, _ = _types()
        return output(tokens.to(torch.int32)[:, None], tensors)

    def gather_logprobs(
        self, hidden_states: Tensor, num_logprobs: int, token_ids: Tensor, embedding_bias: Tensor | None = None
    ) -> Any:
        """LogprobsTensors of given tokens [N] (of a prompt, say) under the head as it is, and of the n best."""

        def check() -> None:
            _few("num_logprobs", num_logprobs)
            if self._validate:
                checks.linear(hidden_states, self._lm_head.weight, token_ids, embedding_bias)

        self._agreed(check, hidden_states, lambda: (num_logprobs, list(hidden_states.shape)))
        scores = self._raw(hidden_states, embedding_bias, token_ids, max(num_logprobs, 1))
        return _tensors(token_ids, scores, num_logprobs)

    def _check_rows(self, hidden: Any, bias: Any, row_keys: Any) -> None:
        checks.tensor("hidden_states", hidden, checks.FLOAT_DTYPES)
        ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        checks.linear(hidden, self._lm_head.weight, ids, bias)
        checks.draw(self._seed, row_keys, hidden)

    def _agreed(self, check: Callable[[], T], hidden: Any, stated: Callable[[], Any]) -> T:
        return together.checked(check, self._head["tp_group"], (hidden,), validate=self._validate, stated=stated)

    def _keys(self, count: int, generators: Mapping[int, torch.Generator], device: torch.device) -> Tensor:
        keys = torch.arange(count, device=device) + (self._step << 32)
        self._step += 1
        for row, generator in generators.items():
            own = torch.empty(1, dtype=torch.int64, device=generator.device).random_(generator=generator)
            keys[row] = -1 - own.to(device)[0]  # negative: no number of a call
        return keys

    def _draw(
        self, hidden: Tensor, bias: Tensor | None, of: Any, keys: Tensor, best: int | None
    ) -> tuple[Tensor, _Scores | None]:
        parts = []
        groups = _groups(of, hidden.shape[0], self._head["real_vocab_size"], hidden.device)
        for index, program in groups:
            rows, own = (hidden, keys) if index is None else (hidden[index], keys[index])
            drawn: dict[str, Any] = {}
            if not program.greedy:
                temperature = of.temperature if index is None else of.temperature[index]
                drawn = {"temperature": temperature.to(rows.device, torch.float32) / self.scale, "topk": best}
            out = vocab_parallel_sample(
                rows, self._lm_head.weight, bias, program=program, seed=self._seed, row_keys=own, **drawn, **self._head
            )
            if best is None:
                scores = None
            elif program.greedy:  # scored under the head as it is, as there
                scores = self._raw(rows, bias, out.token, best)
            else:
                assert out.top_logp is not None and out.top_ids is not None and out.token_rank is not None
                scores = _Scores(out.logp, out.top_logp, out.top_ids, out.token_rank)
            parts.append((out.token, scores))
        if len(parts) == 1 and groups[0].which is None:
            return parts[0]
        order = torch.cat([rows.which for rows in groups if rows.which is not None]).argsort()
        tokens = torch.cat([token for token, _ in parts])[order]
        scored = [scores for _, scores in parts if scores is not None]
        if not scored:
            return tokens, None
        return tokens, _Scores(*(torch.cat(column)[order] for column in zip(*scored, strict=True)))

    def _raw(self, hidden: Tensor, bias: Tensor | None, tokens: Tensor, best: int) -> _Scores:
        out = self._logp(hidden, bias, tokens, topk=best)
        assert isinstance(out, LogpOutput)
        assert out.top_logp is not None and out.top_ids is not None and out.target_rank is not None
        return _Scores(out.logp, out.top_logp, out.top_ids, out.target_rank)

    def _logp(self, hidden: Tensor, bias: Tensor | None, tokens: Tensor, **options: Any) -> Tensor | LogpOutput:
        with torch.no_grad():
            return linear_logp(
                hidden, self._lm_head.weight, tokens, bias, ignore_index=-(2**63),
                temperature=None if self.scale == 1.0 else 1 / self.scale, **options, **self._head,
            )  # fmt: skip

    def _chosen(
        self, hidden: Tensor, bias: Tensor | None, tokens: Tensor, ids: Mapping[int, Sequence[int]], scores: _Scores
    ) -> Any:
        """The sampled token, then each row's own ids, then -inf."""
        count, widest = hidden.shape[0], max(map(len, ids.values()))
        rows = [row for row, own in ids.items() for _ in own]
        places = [1 + place for own in ids.values() for place in range(len(own))]
        flat = torch.tensor([token for own in ids.values() for token in own], device=hidden.device)
        all_ids = torch.zeros(count, widest + 1, dtype=torch.int64, device=hidden.device)
        logprobs = torch.full((count, widest + 1), float("-inf"), device=hidden.device)
        all_ids[:, 0], logprobs[:, 0] = tokens, scores.logp
        if rows:
            found = self._logp(hidden[rows], bias, flat)
            assert isinstance(found, Tensor)
            all_ids[rows, places], logprobs[rows, places] = flat, found
        _, tensors = _types()
        return tensors(all_ids.to(torch.int32), logprobs, scores.rank)


def _mode(mode: str) -> str:
    if mode not in MODES:
        raise NotImplementedError(f"logprobs_mode must be one of {MODES}, got {mode!r}")
    return mode


def _few(name: str, wanted: int) -> None:
    if not 0 <= wanted <= MOST_BEST:
        of_all = " (all of the vocabulary)" if wanted == -1 else ""
        raise NotImplementedError(f"{name} = {wanted}{of_all} is not supported; ask for 0 ... {MOST_BEST}")


def _tensors(tokens: Tensor, scores: _Scores, wanted: int) -> Any:
    _, tensors = _types()
    all_ids = torch.cat([tokens[:, None], scores.top_ids[:, :wanted]], 1).to(torch.int32)
    return tensors(all_ids, torch.cat([scores.logp[:, None], scores.top_logp[:, :wanted]], 1), scores.rank)


def _types() -> tuple[Any, Any]:
    outputs = sys.modules.get("vllm.v1.outputs")
    if outputs is None:
        return SamplerOutput, LogprobsTensors
    return outputs.SamplerOutput, outputs.LogprobsTensors


def _refuse(of: Any) -> None:
    holder = getattr(of, "thinking_budget_state_holder", None)
    for name, asked in (
        ("presence, frequency and repetition penalties", not of.no_penalties),
        ("allowed_token_ids_mask", of.allowed_token_ids_mask is not None),
        ("bad_words_token_ids", bool(of.bad_words_token_ids)),
        ("thinking_budget_state_holder", holder is not None and holder.has_tracked_requests()),
    ):
        if asked:
            raise NotImplementedError(f"{name} is not supported; take vLLM's own Sampler for such a batch")
    processors = of.logitsprocs
    for processor in (*processors.non_argmax_invariant, *processors.argmax_invariant):
        if not (_idle(processor) or hasattr(processor, "min_p_count")):
            raise NotImplementedError(
                f"logits processor {type(processor).__name__} is not supported; take vLLM's own Sampler for it"
            )


def _idle(processor: Any) -> bool:
    """vLLM's own that change nothing in this batch: no request has biases or a least number of tokens."""
    states = [getattr(processor, name) for name in ("biases", "min_toks") if hasattr(processor, name)]
    return bool(states) and not any(states)


def _min_p(of: Any, count: int) -> list[float]:
    for processor in of.logitsprocs.argmax_invariant:
        if getattr(processor, "min_p_count", 0):
            return [float(processor.min_p_cpu[row]) for row in range(count)]
    return [0.0] * count


def _groups(of: Any, count: int, vocabulary: int, device: torch.device) -> list[_Rows]:
    """Rows by what they are drawn under, in the order of the first of each; reads back only what may differ."""
    if of.all_greedy:
        return [_Rows(None, GREEDY)]
    min_p = _min_p(of, count)
    if of.all_random and of.top_k is None and of.top_p is None and not any(min_p):
        return [_Rows(None, SamplingProgram())]
    greedy = [False] * count if of.all_random else [t < GREEDY_BELOW for t in of.temperature.tolist()]
    top_k = [0] * count if of.top_k is None else [k if k < vocabulary else 0 for k in of.top_k.tolist()]
    top_p = [1.0] * count if of.top_p is None else of.top_p.tolist()
    found: dict[SamplingProgram, list[int]] = {}
    for row in range(count):
        program = GREEDY if greedy[row] else SamplingProgram.of(min_p=min_p[row], top_k=top_k[row], top_p=top_p[row])
        found.setdefault(program, []).append(row)
    if len(found) <= 1:
        return [_Rows(None, program) for program in found or (GREEDY,)]
    return [_Rows(torch.tensor(rows, device=device), program) for program, rows in found.items()]
