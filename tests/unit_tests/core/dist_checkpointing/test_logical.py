"""Parameters and the boxes that they fill."""

import pytest
import torch

from megatron.core.dist_checkpointing import LogicalPiece, identity_piece, model_logical_pieces, sharded_tensors


class GatedMLP(torch.nn.Module):
    """fc1 holds gate rows over up rows, and says so."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(3, 8, bias=False)
        self.fc2 = torch.nn.Linear(4, 3)

    def logical_pieces(self, prefix):
        names = [f"{prefix}fc1.weight.{part}" for part in ("gate", "up")]
        return {"fc1.weight": [LogicalPiece(n, (4, 3), (3, 1), i * 12, (4, 3), (0, 0)) for i, n in enumerate(names)]}


class Stack(torch.nn.Module):
    """Two gated experts whose gates are stored as one stacked tensor: the outer description wins."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([GatedMLP(), GatedMLP()])

    def logical_pieces(self, prefix):
        return {
            f"experts.{e}.fc1.weight": [LogicalPiece(f"{prefix}gate", (1, 4, 3), (12, 3, 1), 0, (2, 4, 3), (e, 0, 0))]
            for e in range(2)
        }


class Wrapper(torch.nn.Module):
    """Stands for DDP and its kin."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_modules_describe_their_parameters_and_others_are_stored_as_they_are():
    pieces = model_logical_pieces(Wrapper(Wrapper(torch.nn.Sequential(GatedMLP(), torch.nn.LayerNorm(3)))))
    assert list(pieces) == ["0.fc1.weight", "0.fc2.weight", "0.fc2.bias", "1.weight", "1.bias"]
    assert [piece.key for piece in pieces["0.fc1.weight"]] == ["0.fc1.weight.gate", "0.fc1.weight.up"]
    assert pieces["0.fc2.weight"] == [identity_piece("0.fc2.weight", (3, 4))]


def test_outer_module_wins_over_inner():
    pieces = model_logical_pieces(torch.nn.ModuleDict({"mlp": Stack()}))
    assert [pieces[f"mlp.experts.{e}.fc1.weight"][0].key for e in range(2)] == ["mlp.gate"] * 2


def test_views_alias_the_parameter_even_inside_a_flat_buffer():
    model = GatedMLP()
    flat = torch.zeros(64)
    parameter_shaped = flat[16:40].view(8, 3)
    gate, up = sharded_tensors(model_logical_pieces(model)["fc1.weight"], parameter_shaped, prefix="m.")
    gate.data.fill_(1)
    up.data.fill_(2)
    assert (gate.key, up.key) == ("m.fc1.weight.gate", "m.fc1.weight.up")
    assert torch.equal(flat[16:40], torch.tensor([1.0] * 12 + [2.0] * 12))
    assert flat[:16].abs().sum() == flat[40:].abs().sum() == 0


def test_tied_parameter_appears_once_under_its_first_name():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert list(model_logical_pieces(model)) == ["a.weight"]


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_identity_of_small_shapes(shape):
    assert identity_piece("k", shape).view_of(torch.zeros(shape)).shape == shape


def test_wrong_descriptions_are_refused():
    with pytest.raises(ValueError, match="leaves its stored tensor"):
        LogicalPiece("k", (2, 3), (3, 1), 0, (2, 3), (1, 0))
    with pytest.raises(ValueError, match="contiguous"):
        identity_piece("k", (3, 2)).view_of(torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="reaches element 5 of a tensor of 4"):
        identity_piece("k", (3, 2)).view_of(torch.zeros(4))
    model = GatedMLP()
    model.logical_pieces = lambda prefix: {"nothing": [identity_piece("x", (1,))]}
    with pytest.raises(ValueError, match="does not have: nothing"):
        model_logical_pieces(model)
