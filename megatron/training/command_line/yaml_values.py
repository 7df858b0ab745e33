"""YAML text to plain values: names, lists, numbers, words. What else YAML can say is refused, and bounded in size.

What the names mean is yaml_config.py's to know.
"""

from typing import Any

import yaml

# Beyond, a file is no configuration: a few lines of references can stand for more values than memory holds.
_MAX_CHARACTERS = 1 << 20
_MAX_VALUES = 100_000
_MAX_DEPTH = 20
_PREFIX = "tag:yaml.org,2002:"
_COLLECTIONS = {f"{_PREFIX}map", f"{_PREFIX}seq"}
_SCALARS = {f"{_PREFIX}{name}" for name in ("str", "int", "float", "bool", "null")}
_MERGE = f"{_PREFIX}merge"


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader that does not recurse without end, and refuses a key given twice, where YAML takes the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth == _MAX_DEPTH:
            raise _error(f"it is nested deeper than {_MAX_DEPTH} levels", self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Before the base class folds equal keys together.
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _error(f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def check(self, node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
        """How many values a node stands for; sizes: of the nodes seen so far, None while one is being looked at."""
        if node in sizes:
            size = sizes[node]
            if size is None:
                raise _error("it refers to itself", node.start_mark)
            return size
        sizes[node] = None
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        elif node.tag not in _COLLECTIONS:
            raise _error(f"{node.tag} is not available: must be lists and names with values", node.start_mark)
        total = 1 + sum(self.check(inner, sizes) for inner in _inside(node))
        if total > _MAX_VALUES:
            raise _error(f"it stands for more than {_MAX_VALUES} values", node.start_mark)
        sizes[node] = total
        return total

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        if node.tag == _MERGE:
            return
        if node.tag not in _SCALARS:
            kind = node.tag.removeprefix(_PREFIX)
            raise _error(f"{node.value!r:.60} is a {kind} to YAML: put it in quotes", node.start_mark)
        # Where the file itself says the type.
        if node.tag not in (self.resolve(yaml.ScalarNode, node.value, (True, False)), f"{_PREFIX}str"):
            raise _error(f"{node.value!r:.60} is no {node.tag.removeprefix(_PREFIX)}", node.start_mark)


def plain_values(text: str) -> Any:
    """The value that a YAML text stands for. Raises ValueError saying what is wrong and where."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters: must be at most {_MAX_CHARACTERS}")
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        loader.check(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error("a list or mapping is no name of a value", key.start_mark)
    return [part for pair in node.value for part in pair]


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)
