"""A patched causal LM beside the same one with its logits: values, gradients, PEFT, TRL, and what is refused."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vocabshard as vs
from vocabshard.integrations import huggingface as hf
from vocabshard.testing.compare import assert_same_bytes

transformers = pytest.importorskip("transformers")

V, B, S = 203, 3, 9
SMALL = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, initializer_range=0.2, attn_implementation="eager",
)  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0}),
    "phi-bias": ("PhiConfig", {}),  # a head with a bias
}


def make(name: str = "llama", **changed: Any) -> Any:
    kind, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, **more, **changed})
    model = transformers.AutoModelForCausalLM.from_config(config)
    bias = model.get_output_embeddings().bias
    if bias is not None:
        nn.init.normal_(bias)
    return model.eval()


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (B, S), generator=g)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :4] = -100
    mask[1, :3], labels[1, :3] = 0, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def over_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the labels, 0 where they are ignored."""
    logp = torch.log_softmax(logits.float(), -1)
    kept = labels != -100
    found = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(~kept, 0), -(logp.exp() * logp).sum(-1).masked_fill(~kept, 0)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_logits(name: str) -> None:
    model, given = make(name), batch()
    plain = model(**given)
    want = over_logits(plain.logits[:, :-1], given["labels"][:, 1:])
    weights = torch.randn(B, S - 1), torch.randn(B, S - 1)
    (plain.loss + sum((w * x).sum() for w, x in zip(weights, want, strict=True))).backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    hf.patch_lm_head(model)
    model.get_output_embeddings().register_forward_hook(lambda *_: pytest.fail("logits were made"))
    out = model(**given)
    assert out.logits is None and out.log_probs.dtype == torch.float32
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((out.log_probs, out.entropy), want, rtol=1e-5, atol=5e-6)
    assert torch.equal(out.label_mask, given["labels"][:, 1:] != -100)
    assert (out.entropy[~out.label_mask] == 0).all()
    (out.loss + (weights[0] * out.log_probs).sum() + (weights[1] * out.entropy).sum()).backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for key, grad in found.items():
        torch.testing.assert_close(grad, wanted[key], rtol=1e-3, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_the_bytes_are_linear_logps() -> None:
    model, given = make().to(torch.bfloat16), batch()
    given["labels"].clamp_(max=199)
    hidden = model.model(given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state[:, :-1]
    want = vs.linear_logp(
        hidden, model.lm_head.weight, given["labels"][:, 1:], temperature=0.7, real_vocab_size=200, return_lse=True
    )
    out = hf.patch_lm_head(model, temperature=0.7, real_vocab_size=200, return_entropy=False)(**given)
    assert_same_bytes(out.log_probs, want.logp)
    assert_same_bytes(out.lse, want.lse)
    assert out.entropy is None


def test_arguments_of_the_call() -> None:
    model, given = make(), batch()
    ids, labels = given["input_ids"], given["labels"]
    shifted = torch.cat([labels[:, 1:], torch.full((B, 1), -100)], 1)
    plain = [
        model(**given, num_items_in_batch=torch.tensor(7)).loss,
        model(ids, shift_labels=shifted, labels=labels).loss,
    ]
    hf.patch_lm_head(model)
    torch.testing.assert_close(model(**given, num_items_in_batch=torch.tensor(7)).loss, plain[0])
    out = model(ids, None, None, shift_labels=shifted)
    assert out.log_probs.shape == (B, S)
    torch.testing.assert_close(out.loss, plain[1])
    out = model(**given, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and out.hidden_states[0].shape == (B, S, 32)
    ignoring = model(ids, labels=torch.where(labels == -100, 3, labels), ignore_index=3)
    assert torch.equal(ignoring.label_mask, ~torch.isin(labels[:, 1:], torch.tensor([-100, 3])))
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), labels=labels)
    assert_same_bytes(embedded.log_probs, model(ids, labels=labels).log_probs)


def test_without_labels_nothing_changes_and_unpatching_restores() -> None:
    model, given = make(), batch()
    ids, mask = given["input_ids"], given["attention_mask"]
    before = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    logits, signature = model(ids, attention_mask=mask).logits, inspect.signature(model.forward)
    assert hf.patch_lm_head(model) is model
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), before)
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)
    assert torch.equal(model(**given, fused_lm_head=False).logits, logits)
    with pytest.raises(ValueError, match="patched already"):
        hf.patch_lm_head(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    torch.testing.assert_close(twin(**given).log_probs[2, 0], -torch.tensor(float(V)).log())
    assert twin(**given).log_probs[2, 0] != model(**given).log_probs[2, 0]
    assert hf.unpatch_lm_head(model) is model
    assert "forward" not in model.__dict__ and model(**given).logits.shape == (B, S, V)
    hf.unpatch_lm_head(model)


def test_a_forward_of_the_models_own_comes_back() -> None:
    model, given = make(), batch()
    original = model.forward
    model.forward = lambda *args, **kwargs: ("own", original(*args, **kwargs))
    hf.patch_lm_head(model)
    assert model(**given).loss > 0 and model(given["input_ids"])[0] == "own"
    hf.unpatch_lm_head(model)
    assert model(**given)[0] == "own"


def test_a_head_that_owns_its_shard() -> None:
    """VocabParallelLMHead as the model's head: its padding is no vocabulary."""
    model, given = make(), batch()
    want = hf.patch_lm_head(model)(**given).log_probs
    head = vs.VocabParallelLMHead(32, V)
    head.load_state_dict(model.lm_head.state_dict())
    with torch.no_grad():
        head.weight[V:] = 9.0
    model.set_output_embeddings(head)
    assert_same_bytes(model(**given).log_probs.detach(), want.detach())


@pytest.mark.parametrize(
    "call, text",
    [
        ({"logits_to_keep": 2}, "logits_to_keep"),
        ({"return_dict": False}, "return_dict"),
        ({"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_what_a_call_refuses(call: dict, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        hf.patch_lm_head(make())(**batch(), **call)


def test_what_patching_refuses() -> None:
    with pytest.raises(TypeError, match="'softcap'"):
        hf.patch_lm_head(make(), softcap=3.0)
    with pytest.raises(TypeError, match="expected a causal LM of transformers, got Linear"):
        hf.patch_lm_head(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="no language model head"):
        hf.patch_lm_head(make().model)
    capped = make("cohere")
    capped.config.final_logit_softcapping = 3.0
    with pytest.raises(NotImplementedError, match="soft-cap"):
        hf.patch_lm_head(capped)
    own_loss = make()
    own_loss.loss_function = lambda *args, **kwargs: None
    with pytest.raises(NotImplementedError, match="loss_function"):
        hf.patch_lm_head(own_loss)(**batch())
    out = hf.patch_lm_head(make())(**batch())
    for name in ("is_top1", "mean_logits"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(out, name)


# ---- PEFT ----


def adapted(**config: Any) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    model = peft.get_peft_model(make(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **config))
    return peft, model


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_peft_models(saved: list[str] | None) -> None:
    """A frozen head, and one that PEFT trains a copy of; adapters on and off."""
    _, model = adapted(target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    given = batch()
    plain = model(**given)
    plain.loss.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head" in key for key in wanted) == (saved is not None)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.add_(0.01)  # the copy is no longer the original
        plain = model(**given)
        with model.disable_adapter():
            plain_off = model(**given).loss
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.sub_(0.01)
    model.zero_grad()
    hf.patch_lm_head(model)
    out = model(**given)
    out.loss.backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for key, grad in found.items():
        torch.testing.assert_close(grad, wanted[key], rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.add_(0.01)
        torch.testing.assert_close(model(**given).loss, plain.loss)
        with model.disable_adapter():
            torch.testing.assert_close(model(**given).loss, plain_off)
    assert "forward" not in hf.unpatch_lm_head(model).get_base_model().__dict__


def test_a_head_that_lora_adapts_is_refused() -> None:
    _, model = adapted(target_modules=["lm_head"])
    given = batch()
    with torch.no_grad(), model.disable_adapter():
        off = model(**given).loss
    hf.patch_lm_head(model)
    with pytest.raises(NotImplementedError, match="LoRA adapts"):
        model(**given)
    with model.disable_adapter():
        torch.testing.assert_close(model(**given).loss, off)
    model.merge_adapter()
    merged = model(**given).loss
    hf.unpatch_lm_head(model)
    torch.testing.assert_close(model(**given).loss, merged)


# ---- TRL ----


def test_selective_log_softmax() -> None:
    logits = (torch.randn(B, S, V) * 3).requires_grad_()
    index, several, mask = torch.randint(V, (B, S)), torch.randint(V, (B, S, 4)), torch.ones(B, S, dtype=torch.long)
    mask[0, 2:5] = 0
    want = torch.log_softmax(logits / 0.7, -1)
    entropy = -(want.exp() * want).sum(-1)
    one = want.gather(-1, index[..., None])[..., 0].masked_fill(mask == 0, 0)
    found = hf.selective_log_softmax(logits, index, 0.7, mask)
    torch.testing.assert_close(found, one)
    upstream = torch.randn(B, S)
    grads = [torch.autograd.grad(x, logits, upstream, retain_graph=True)[0] for x in (found, one)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(hf.selective_log_softmax(logits, several, 0.7), want.gather(-1, several))
    found, ours = hf.selective_log_softmax_and_entropy(logits, index, True, 0.7, mask)
    torch.testing.assert_close((found, ours), (one, entropy.masked_fill(mask == 0, 0)))
    assert ours.requires_grad
    assert not hf.selective_log_softmax_and_entropy(logits, index, entropy_requires_grad=False)[1].requires_grad
    with pytest.raises(ValueError, match="positive"):
        hf.selective_log_softmax(logits, index, 0.0)


def test_several_ids_a_row_are_of_their_own_row() -> None:
    logits, index = torch.randn(B, S, V, requires_grad=True), torch.randint(V, (B, S, 4))
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, 2:5] = 0
    index[0, 3] = -1  # left out, so of no account
    want = torch.log_softmax(logits, -1).gather(-1, index.clamp(min=0)).masked_fill(mask[..., None] == 0, 0)
    for of in (mask, mask[..., None], mask[..., None].expand_as(index)):
        torch.testing.assert_close(hf.selective_log_softmax(logits, index, row_mask=of), want)
    with pytest.raises(ValueError, match="index must be"):
        hf.selective_log_softmax(logits, index[:, :2])
    with pytest.raises(ValueError, match="leading shape"):
        hf.selective_log_softmax(logits, index[0, :, 0])
    with pytest.raises(ValueError, match="row_mask must be"):
        hf.selective_log_softmax(logits, index[..., 0], row_mask=mask[:, :1])
    with pytest.raises(TypeError, match="index must be"):
        hf.selective_log_softmax(logits, None)  # type: ignore[arg-type]


def test_beside_the_real_trl() -> None:
    """Its signatures, its head's outputs for a GRPO step, and its functions on its own test's inputs."""
    trl = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)
    for name in ("selective_log_softmax", "selective_log_softmax_and_entropy"):
        theirs, ours = (inspect.signature(getattr(module, name)).parameters.values() for module in (trl, hf))
        wanted = [(p.name, p.default) for p in theirs]
        assert wanted == [(p.name, p.default) for p in ours][: len(wanted)]
    model, given = make("gemma2"), batch()
    trl.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    theirs = model(**given, fused_lm_head=True)
    hf.patch_lm_head(model, temperature=0.7)
    out = model(**given, fused_lm_head=True)
    for name in ("loss", "log_probs", "entropy", "label_mask"):
        torch.testing.assert_close(getattr(out, name), getattr(theirs, name), rtol=1e-5, atol=5e-6)
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        logits, index = torch.randn(4, 9, 300).to(dtype), torch.randint(300, (4, 9))
        want = trl.selective_log_softmax(logits, index).float()
        torch.testing.assert_close(hf.selective_log_softmax(logits, index), want, rtol=close, atol=close)


def test_composed() -> None:
    """Under autocast, with gradient checkpointing and through Dynamo."""
    model, given = make().train(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        own = model(**given).loss
    hf.patch_lm_head(model)
    plain = model(**given).loss
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(**given).loss
    torch.testing.assert_close(cast, own, rtol=1e-2, atol=1e-2)  # bf16 logits have steps of 1/128 and more
    cast.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(torch.compile(model, backend="eager")(**given).loss, plain)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(model(**given).loss, plain)


def test_twenty_steps() -> None:
    """The same losses as with the model's own head and logits."""
    losses = []
    for patched in (False, True):
        model, given = make("qwen3", tie_word_embeddings=True, num_hidden_layers=1).train(), batch()
        if patched:
            hf.patch_lm_head(model)
        optimiser, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for _ in range(20):
            optimiser.zero_grad()
            loss = model(**given).loss
            loss.backward()
            optimiser.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    assert losses[0][-1] < losses[0][0] / 2
