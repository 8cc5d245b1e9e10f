"""Selected-token log-probs of a language model's head, sharded by vocabulary, the same bytes whatever the sharding."""

from vocabshard.contract import ContractError, Provenance
from vocabshard.fingerprint import weight_fingerprint
from vocabshard.functional import batch_invariant_logp, linear_logp, provenance, vocab_parallel_logp
from vocabshard.logprob_contract import LogprobContract
from vocabshard.modules import VocabParallelEmbedding, VocabParallelLinearLogp, VocabParallelLMHead
from vocabshard.options import GradOptions, LogpOutput, SampleOutput
from vocabshard.registry import get_logprob_op, get_op
from vocabshard.sample import vocab_parallel_sample
from vocabshard.sampling import SamplingProgram
from vocabshard.shard import VocabShard

__version__ = "0.1.0"

__all__ = [
    "ContractError",
    "GradOptions",
    "LogpOutput",
    "LogprobContract",
    "Provenance",
    "SampleOutput",
    "SamplingProgram",
    "VocabParallelEmbedding",
    "VocabParallelLMHead",
    "VocabParallelLinearLogp",
    "VocabShard",
    "__version__",
    "batch_invariant_logp",
    "get_logprob_op",
    "get_op",
    "linear_logp",
    "provenance",
    "vocab_parallel_logp",
    "vocab_parallel_sample",
    "weight_fingerprint",
]
