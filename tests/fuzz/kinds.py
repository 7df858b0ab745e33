"""KINDS maps each kind of fuzzed input to its fuzzer."""

from tests.fuzz.checkpoints import CheckpointFuzzer
from tests.fuzz.engine import FuzzerFactory
from tests.fuzz.flags import FlagFuzzer
from tests.fuzz.index_files import IndexCacheFuzzer, IndexFuzzer
from tests.fuzz.legacy_files import LegacyFuzzer
from tests.fuzz.yaml_files import YamlFuzzer

KINDS: dict[str, FuzzerFactory] = {
    "flags": FlagFuzzer,
    "yaml": YamlFuzzer,
    "idx": IndexFuzzer,
    "cache": IndexCacheFuzzer,
    "checkpoints": CheckpointFuzzer,
    "legacy": LegacyFuzzer,
}
