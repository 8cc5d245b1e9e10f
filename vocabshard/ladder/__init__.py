"""The ladder: from "the same call again" to "a rollout and its training", each rung counting rows that differ.

`vocabshard validate` climbs it on this machine, the tests on theirs. L1 repeats a call; L2 changes batch, position,
padding, bucket and sharding; L3 compares entries and backends at layouts of real models; L4 scores in one process and
recomputes in others at another tensor-parallel degree; L5 is an RL run (examples/rl_loop). Beside each stands what an
ordinary log_softmax does on the same inputs: a rung on which it too shows no difference proves little.
"""

from vocabshard.ladder.rungs import Rung

__all__ = ["Rung"]
