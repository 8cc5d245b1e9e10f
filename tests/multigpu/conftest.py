"""Tests that run on several ranks, each of which runs pytest: `torchrun --nproc-per-node 4 -m pytest tests/multigpu`.

Inside torchrun every test ends with an exchange of its outcome: it fails on all ranks when it failed on one, whose
traceback is printed with its rank before each line. The next test follows where all ranks have made the same
collectives; else they may be out of step, and the run ends. Rank 0 alone prints the ordinary report. In one process
(plain pytest) the selected tests of each file become one test, which starts 4 ranks on them.
"""

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist
from _pytest.terminal import TerminalReporter

from vocabshard.launching import Ranks, init_from_env, run

T = TypeVar("T")
Wrapper = Generator[None, T, T]

HERE = Path(__file__).parent
NPROC = 4
ON_RANKS = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
RANK = int(os.environ.get("RANK", 0))

# A rank that waits in a collective for one that failed gives up after the first; the failed one waits for it in the
# exchange of outcomes, so a little longer.
COLLECTIVE_TIMEOUT = timedelta(seconds=int(os.environ.get("MULTIGPU_TIMEOUT", 60)))
EXCHANGE_TIMEOUT = COLLECTIVE_TIMEOUT + timedelta(seconds=30)


class Rendezvous:
    """This rank's place, and a gloo group of the harness's own for outcomes."""

    def __init__(self) -> None:
        self.ranks = init_from_env(COLLECTIVE_TIMEOUT)
        self.exchange = dist.new_group(backend="gloo", timeout=EXCHANGE_TIMEOUT)

    def gather(self, mine: str) -> list[str]:
        """Every rank's text, in rank order. Collective; RuntimeError where a rank doesn't come."""
        gathered: list[str] = [""] * self.ranks.world_size
        dist.all_gather_object(gathered, mine, group=self.exchange)
        return gathered


RENDEZVOUS = pytest.StashKey[Rendezvous]()
BEFORE = pytest.StashKey[dict[str, int]]()  # collectives by group, when the test began


def _collectives() -> dict[str, int]:
    """How many of each group this rank has begun: "name: its ranks". A gloo group counts sends and receives too."""
    counts = {}
    for group in dist.distributed_c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            name = f"{dist.distributed_c10d._get_process_group_name(group)}: {dist.get_process_group_ranks(group)}"
            counts[name] = group._get_sequence_number_for_group()
    return counts


def _since(before: dict[str, int]) -> str:
    """What a test has begun, as text: collectives of each group, and how many groups there have ever been."""
    begun = {name: count - before.get(name, 0) for name, count in _collectives().items()}
    return json.dumps([dist.distributed_c10d._world.group_count, begun])


def _in_step(texts: list[str]) -> bool:
    """Whether all ranks of each group have begun as many collectives of it (`texts` of _since, in rank order)."""
    groups, begun = zip(*map(json.loads, texts), strict=True)
    names = set().union(*begun)
    each = ([counts.get(name) for rank, counts in enumerate(begun) if rank in _members(name)] for name in names)
    return len(set(groups)) == 1 and all(len(set(counts)) == 1 for counts in each)


def _members(name: str) -> list[int]:
    return json.loads(name.partition(": ")[2])


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """This process's place among the ranks; the default process group is theirs."""
    return request.config.stash[RENDEZVOUS].ranks


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if ON_RANKS and config.option.tbstyle == "auto":
        config.option.tbstyle = "short"  # else mostly torch's own text, once for each rank
    if ON_RANKS and RANK:
        sink = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(TerminalReporter(config, sink), "terminalreporter")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not ON_RANKS:
        return
    session.config.stash[RENDEZVOUS] = here = Rendezvous()
    if "multigpu" in session.config.getoption("--require") and here.ranks.backend != "nccl":
        pytest.exit(f"--require multigpu: {here.ranks.world_size} ranks, but fewer GPUs", returncode=1)


def pytest_collection_finish(session: pytest.Session) -> None:
    if ON_RANKS:
        mine = f"{session.testsfailed} {[item.nodeid for item in session.items]}"
        if len(set(session.config.stash[RENDEZVOUS].gather(mine))) > 1:
            pytest.exit("the ranks did not collect the same tests", returncode=1)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if ON_RANKS and RENDEZVOUS in config.stash:
        # The launcher ends the others when the first failed rank is gone: not before rank 0 has printed its report.
        with contextlib.suppress(RuntimeError):
            config.stash[RENDEZVOUS].gather("done")
        dist.destroy_process_group()


def _show(config: pytest.Config, title: str, text: str) -> None:
    """Print a failure at once, past pytest's capture: the other ranks may be stuck, and the run may end there."""
    capture = config.pluginmanager.getplugin("capturemanager")
    lines = "".join(f"[rank {RANK}] {line}\n" for line in [title, *text.splitlines()])
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        sys.stderr.write("\n" + lines)
        sys.stderr.flush()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Wrapper[pytest.CollectReport]:
    report = yield
    if ON_RANKS and report.failed:
        _show(collector.config, f"can't collect {report.nodeid}", report.longreprtext)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if ON_RANKS:
        item.stash[BEFORE] = _collectives()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Wrapper[pytest.TestReport]:
    report = yield
    if not ON_RANKS or (report.when == "setup" and report.passed):  # what a call needs, its own exchange follows
        return report
    if report.failed:
        _show(item.config, f"{report.when} of {report.nodeid} failed", report.longreprtext)
    try:
        # With the message: when one rank fails, those that waited for it in a collective fail too, but otherwise.
        message = call.excinfo.exconly().splitlines()[0] if report.failed and call.excinfo else ""
        mine = f"{report.outcome} {message:.80}".strip() + "\n" + _since(item.stash[BEFORE])
        told = [text.split("\n") for text in item.config.stash[RENDEZVOUS].gather(mine)]
    except RuntimeError as error:
        _show(item.config, f"{report.nodeid}: no outcome from some rank", str(error))
        os._exit(1)  # an orderly end would wait for the missing rank again
    outcomes = [outcome for outcome, _ in told]
    if len(set(outcomes)) > 1:
        each = "\n".join(["the ranks disagree", *(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))])
        report.longrepr = report.longrepr if report.failed else each
        report.outcome = "failed"
        if not _in_step([begun for _, begun in told]):
            item.session.shouldstop = f"the ranks disagree about {report.nodeid} and may be out of step"
    return report


class OnRanks(pytest.Item):
    """The selected tests of one file, run on NPROC ranks."""

    tests: list[str]

    def runtest(self) -> None:
        options = [f"--require={what}" for what in self.config.getoption("--require")]
        code = run(NPROC, ["pytest", "-q", "-p", "no:cacheprovider", *options, *self.tests], module=True)
        if code:
            pytest.fail(f"pytest on {NPROC} ranks ended with exit code {code}: see the captured output", pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{len(self.tests)} tests on {NPROC} ranks"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_RANKS:
        items[:] = _one_for_each_file(items)


def _one_for_each_file(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    tests = defaultdict(list)
    for item in items:
        tests[item.path].append(item)
    for path, of_file in tests.items():
        if HERE in path.parents:
            item = OnRanks.from_parent(of_file[0].getparent(pytest.Module), name=f"on {NPROC} ranks")
            item.tests = [f"{path}::{test.nodeid.partition('::')[2]}" for test in of_file]
            yield item
        else:
            yield from of_file
