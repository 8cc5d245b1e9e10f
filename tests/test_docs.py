"""Every code block of README, docs and examples: Python and the `vocabshard` command are run and their output compared;
of other programs' commands the files, modules and options have to exist. And links lead somewhere.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from vocabshard import GradOptions, linear_logp
from vocabshard.command import build_parser, main
from vocabshard.testing import megatron_model

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "examples", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found, opened = [], None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.lstrip().startswith("```"):
            if opened:
                opened[3].append(line)
        elif opened:
            indent = opened[1]
            found.append(Block(*opened[0], opened[2], "\n".join(text[indent:] for text in opened[3])))
            opened = None
        else:
            where = (page.relative_to(ROOT).as_posix(), number)
            opened = (where, len(line) - len(line.lstrip()), line.strip().removeprefix("```"), [])
    assert opened is None, f"{page}: a block that does not end"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"python", "json", ""}


def test_languages() -> None:
    """No language that nothing below looks at; and the pages have blocks of each kind."""
    assert {block.language for block in BLOCKS} == LANGUAGES


# ---- Python: all blocks of a page, one after the other, with what its text says is there ----


def given(page: str) -> dict[str, object]:
    """What the blocks of a page take from its text: the tensors and the group of one process."""
    torch.manual_seed(0)
    if page == "README.md":
        weight_shard = torch.zeros(152064, 64)
        return {"tp_group": None, "weight_shard": weight_shard, "bias_shard": torch.zeros(152064)}
    if page.startswith("docs/integrations/"):  # a model's own tensors, under the names that its users have for them
        hidden, weight = (torch.randn(rows, 8).requires_grad_() for rows in (6, 50))
        target = torch.randint(50, (6,))
        names = dict.fromkeys(("weight", "lm_head_weight"), weight) | dict.fromkeys(("target", "target_ids"), target)
        return {**names, "hidden": hidden, "tp_group": None, **around(page)}
    if page == "docs/gradients.md":
        weight = torch.randn(50, 8).requires_grad_()
        weight.main_grad = torch.zeros(50, 8)
        hidden, target_ids = torch.randn(3, 8), torch.arange(3)
        names = {"linear_logp": linear_logp, "GradOptions": GradOptions, "group": None}
        return {"weight": weight, "hidden": hidden, "target_ids": target_ids, **names}
    return {}


def around(page: str) -> dict[str, object]:
    """What the page's project has of its own around hidden [6, 8] and weight [50, 8]."""
    names: dict[str, object] = {"labels": torch.arange(6), "bias": torch.randn(50)}
    if page.endswith("torch_native.md"):
        names["mesh"] = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        names |= {key: torch.nn.ModuleDict({"lm_head": torch.nn.Linear(8, 48)}) for key in ("model", "other_model")}
    if page.endswith("vllm.md"):
        head = types.SimpleNamespace(weight=torch.randn(64, 8), org_vocab_size=50, num_embeddings_padded=64)
        names["model"] = types.SimpleNamespace(lm_head=head, logits_processor=None)
        names["hidden_states"] = torch.randn(6, 8)
        no_processors = types.SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[])
        names["sampling_metadata"] = types.SimpleNamespace(
            all_greedy=True, generators={}, max_num_logprobs=1, no_penalties=True, allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=no_processors,
        )  # fmt: skip
    if page.endswith("megatron.md"):
        names |= {**megatron_model.batch(), "model": megatron_model.gpt()}
        names |= {"vocab_parallel_logits": torch.randn(6, 50), "hidden_states": torch.randn(6, 8)}
    if page.endswith("huggingface.md"):
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        names["model"] = transformers.AutoModelForCausalLM.from_config(config)
        names["input_ids"] = torch.randint(0, 64, (2, 5))
        names["trainer"] = types.SimpleNamespace(model=names["model"], temperature=0.7)
    return names


@pytest.fixture
def megatrons_groups() -> Iterator[None]:
    """Those of its parallel_state over one rank."""
    pytest.importorskip("megatron.core")
    with megatron_model.groups():
        yield


@pytest.fixture
def other_projects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default process group of this process, as the adapters' projects have one; names of those that are heavy."""
    fake = ["verl", "verl.utils", "verl.utils.kernel", "verl.utils.kernel.linear_cross_entropy"]
    for name in fake if importlib.util.find_spec("verl") is None else []:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name])["linear_cross_entropy"] = print
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.language == "python"}))
def test_python(page: str, request: pytest.FixtureRequest) -> None:
    if page.startswith("docs/integrations/"):
        request.getfixturevalue("other_projects")
    if page.endswith("megatron.md"):
        request.getfixturevalue("megatrons_groups")
    names = given(page)
    for block in BLOCKS:
        if block.page == page and block.language == "python":
            code = "\n" * block.line + block.text  # so that a traceback names the page's line
            exec(compile(code, ROOT / page, "exec"), names)
    if "logp" in names:
        assert torch.isfinite(torch.as_tensor(names["logp"])).all()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=lambda b: f"{b.page}:{b.line}")
def test_json(block: Block) -> None:
    for line in block.text.splitlines():
        assert isinstance(json.loads(line), dict)


# ---- commands ----


def commands_of(block: Block) -> list[str]:
    """The command lines of a block without a language; in a transcript those after a "$"."""
    lines = block.text.replace("\\\n", " ").splitlines()
    transcript = lines[0].startswith("$ ")
    return [line.removeprefix("$ ") for line in lines if line.strip() and (not transcript or line.startswith("$ "))]


SHELL = [block for block in BLOCKS if not block.language]
VARIABLES = {"OMP_NUM_THREADS", "TRITON_INTERPRET", "VOCABSHARD_CUDA", "MULTIGPU_TIMEOUT"}


@pytest.mark.parametrize("block", SHELL, ids=lambda b: f"{b.page}:{b.line}")
def test_commands(block: Block, folder: Path, capsys) -> None:
    if "$ vocabshard doctor" in block.text and (torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ):
        block = block._replace(text="vocabshard doctor")  # the page shows a machine without
    for command in commands_of(block):
        words = shlex.split(command)
        while (name := words[0].partition("=")[0]).isupper():
            assert name in VARIABLES, f"a variable that no test knows: {name}"
            words.pop(0)
        check(words)
    if block.text.startswith("$ ") and not block.text.startswith("$ vocabshard validate"):
        assert_output(block.text.splitlines()[1:], capsys.readouterr().out.splitlines())


def check(words: list[str]) -> None:
    """Runs a `vocabshard` command in this process; of any other command checks what it names."""
    program, *rest = words
    if program == "vocabshard":
        run(rest)
    elif program == "torchrun":
        assert rest[0] == "--nproc-per-node" and int(rest[1]) > 0
        check(["python", *rest[2:]])
    elif (program, rest[0]) == ("python", "launch/run.py"):
        assert rest[1] == "--nproc" and int(rest[2]) > 0
        check(["python", *rest[3:]])
    elif (program, *rest[:2]) == ("python", "-m", "vocabshard"):
        run(rest[2:])
    elif (program, *rest[:2]) == ("python", "-m", "pytest"):
        check_pytest(rest[2:])
    elif program == "python" and rest[0] == "-m":
        module = ROOT / rest[1].replace(".", "/")
        check_script(module / "__main__.py" if module.is_dir() else module.with_suffix(".py"), rest[2:])
    elif program in ("python", "bash"):
        check_script(ROOT / rest[0], rest[1:])
    elif program.startswith("--"):  # an option of a program that uses this one
        for name in rest:
            if name.startswith("vocabshard."):
                module, _, attribute = name.rpartition(".")
                assert hasattr(importlib.import_module(module), attribute)
    else:
        pytest.fail(f"no way to check {program}")


def check_pytest(words: list[str]) -> None:
    """Paths have to exist, options and what is required have to be known."""
    options = iter(words)
    for word in options:
        option, _, value = word.partition("=")
        if option == "--require":
            assert set((value or next(options)).split(",")) <= {"sm90", "triton", "multigpu"}
        elif word == "-n":
            assert int(next(options)) > 0
        elif word == "--dist":
            assert next(options) in ("load", "worksteal")
        else:
            path = value if option == "--ignore" else word
            assert word in ("-q", "-x") or (ROOT / path).exists(), word


def check_script(path: Path, words: list[str]) -> None:
    text = path.read_text()
    for word in words:
        known = f'"{word}"' in text or path.name == "setup.py"
        assert known or not word.startswith("-"), f"{path.name} has no {word}"


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    """Where the names of the pages mean something: tiny_lm with a short text, and scores that commands have made."""
    folder = tmp_path_factory.mktemp("scored")
    tiny = folder / "examples" / "tiny_lm"
    shutil.copytree(ROOT / "examples" / "tiny_lm", tiny)
    (tiny / "text.txt").write_text((tiny / "text.txt").read_text()[:500])
    for name, options in (("fp32", []), ("bf16", ["--dtype", "bf16"])):
        score = ["score", str(tiny), str(tiny / "text.txt"), "--quiet", *options]
        assert main([*score, "--out", str(folder / f"{name}.jsonl")]) == 0
    header, *records = (folder / "fp32.jsonl").read_text().splitlines(keepends=True)
    told = json.loads(header)
    told |= {"tp": 4, "sizes": [640] * 4, "provenance": {**told["provenance"], "shard_ranges": [[0, 640]]}}
    for name in ("tp1", "scores"):
        shutil.copy(folder / "fp32.jsonl", folder / f"{name}.jsonl")
    for name in ("tp4", "other"):
        (folder / f"{name}.jsonl").write_text("".join([json.dumps(told) + "\n", *records]))
    return folder


@pytest.fixture
def folder(scored: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of it as the working directory."""
    copy = shutil.copytree(scored, tmp_path / "work")
    monkeypatch.chdir(copy)
    return copy


def run(words: list[str]) -> None:
    """The command, with what it is given put where capitals stand, on one rank: tests of the ranks are elsewhere."""
    if any(word.startswith("[") for word in words) or words[0] == "validate":  # a synopsis; or minutes: test_ladder.py
        assert set(re.findall(r"--[a-z-]+", " ".join(words))) <= options_of(words[0])
        return
    names = {"CHECKPOINT": "examples/tiny_lm", "FILE": "examples/tiny_lm/text.txt"}
    args = [names.get(word, word) for word in words]
    if "--tp" in args:
        at = args.index("--tp")
        assert int(args.pop(at + 1)) and args.pop(at)
    if args[0] == "validate":
        args += ["--levels", "L3", "--device", "cpu"]  # the other rungs have tests of their own
    assert main([*args, "--quiet"] if args[0] == "score" else args) == (1 if "bf16.jsonl" in args else 0)


def assert_output(expected: list[str], found: list[str]) -> None:
    """The same lines but for numbers; in the page "..." stands for the rest of a line or, by itself, for some lines."""

    def masked(line: str) -> str:
        return re.sub(r"-?\b\d[\d.e+-]*", "#", re.sub(r"\b[0-9a-f]{8}\b", "#", line))

    pattern = ""
    for line in expected:
        here = re.escape(masked(line.replace("...", "\0"))).replace(re.escape("\0"), ".*")
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else here + r"\n"
    assert re.fullmatch(pattern, "".join(masked(line) + "\n" for line in found)), "\n".join(found)


# ---- what the text names ----


@pytest.mark.parametrize("page", NAMES)
def test_links_and_files(page: str) -> None:
    """Links lead to files, and files that are named in backticks by their path exist."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target
    for name in re.findall(r"`((?:tests|docs|examples|benchmarks|vocabshard|csrc|launch)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the command's subcommands."""
    (found,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return found.choices


def options_of(command: str) -> set[str]:
    return {option for action in commands()[command]._actions for option in action.option_strings} - {"-h", "--help"}


@pytest.mark.parametrize("command", commands())
def test_options_are_documented(command: str) -> None:
    """A section of some page, headed by the command, has every option, and no other."""
    heading = f"## `vocabshard {command}"
    (text,) = (page.read_text() for page in PAGES if heading in page.read_text())
    section = text[text.index(heading) :].split("\n## ")[0]
    assert set(re.findall(r"--[a-z][a-z-]*", section)) - {"--nproc-per-node"} == options_of(command)


def test_every_integration_has_a_page_and_a_line() -> None:
    """README's table and the list of pages have each, and each names its module."""
    pages = {path.stem for path in (ROOT / "docs" / "integrations").glob("*.md")}
    modules = {path.stem for path in (ROOT / "vocabshard" / "integrations").glob("*.py")}
    assert pages <= modules
    assert modules - pages == {"__init__", "losses", "vime_replay"}, "an adapter without a page"
    for name in pages:
        assert f"vocabshard.integrations.{name}" in (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
        assert f"(docs/integrations/{name}.md)" in (ROOT / "README.md").read_text(), name
        assert f"(integrations/{name}.md)" in (ROOT / "docs" / "README.md").read_text(), name


def test_extras_are_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for page in PAGES:
        for extra in re.findall(r"pip install '[\w.]*\[(\w+)\]'", page.read_text()):
            assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), f"{page.name}: no extra {extra}"


# ---- errors ----

TROUBLE = ROOT / "docs" / "troubleshooting.md"


def messages() -> list[str]:
    """The texts of the package, "\0" where a value is put in."""
    found = []
    for path in (ROOT / "vocabshard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
    return found


def test_errors_of_the_page_are_those_of_the_package() -> None:
    """Every message that docs/troubleshooting.md explains is one that the package has."""
    told = re.findall(r"^### `(.*)`$", TROUBLE.read_text(), re.MULTILINE)
    assert len(told) > 20
    texts = messages()
    for message in told:
        pattern = ".*".join(map(re.escape, message.split("...")))
        assert any(re.search(pattern, text, re.DOTALL) for text in texts), message
