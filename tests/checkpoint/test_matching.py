"""A tree of state and an outline: what matches, the words for what differs, and what is put in."""

import pytest
import torch

from torchobj import exceptions
from torchobj.checkpoint.matching import UNREAD, Accepts, Differences, Part, Skipped, TensorOutline, assign, match

FOUR = TensorOutline(torch.float32, (4,))


def text(tree, outline):
    found = match(tree, outline)
    assert isinstance(found, Differences)
    return str(found).removeprefix("into does not match: ")


def test_tensors_are_paired_by_their_names():
    tree = {"a": torch.zeros(4), "deep": [torch.zeros(4), {"b": torch.zeros(4)}], "n": 1}
    pairs = match(tree, {"a": FOUR, "deep": [FOUR, {"b": FOUR}], "n": "x"})
    assert [pair.path for pair in pairs] == ["a", "deep.0", "deep.1.b"]
    assert pairs[0].target is tree["a"] and pairs[0].source is FOUR


@pytest.mark.parametrize(
    ("tree", "outline", "expected"),
    [
        ({"a": torch.zeros(3)}, {"a": FOUR}, "a: torch.float32 of shape (3,) here, torch.float32 of shape (4,) in the"),
        ({"a": torch.zeros(4, dtype=torch.int8)}, {"a": FOUR}, "a: torch.int8 of shape (4,) here, torch.float32 of"),
        (torch.zeros(4).to_sparse(), FOUR, "the object: torch.float32 torch.sparse_coo of shape (4,) here"),
        ({"a": torch.zeros(4)}, {"a": UNREAD}, "a: Tensor here, a value in the checkpoint"),
        ({"a": 1}, {"a": FOUR}, "a: int here, torch.float32 of shape (4,) in the checkpoint"),
        ({"a": 1}, {"b": 1}, "a: not in the checkpoint; b: only in the checkpoint"),
        (Part(a=1), {"b": 1, "c": 1}, "a: not in the checkpoint, which has b, c"),
        ({"a": [1]}, {"a": [1, 2]}, "a: list of 1 here, list of 2 in the checkpoint"),
        ([1, 1, 1], TensorOutline(torch.float32, (3,)), "the object: list of 3 here, torch.float32 of shape (3,)"),
        ({"a": Accepts((3,))}, {"a": FOUR}, "a: a tensor of shape (3,) here, torch.float32 of shape (4,) in the"),
        ({"a": Accepts((3,))}, {"a": 5}, "a: a tensor of shape (3,) here, int in the checkpoint"),
        ({"a": torch.empty(4, device="meta")}, {"a": FOUR}, "a: a tensor on meta cannot be filled; to_empty()"),
        ({"a": torch.zeros(1).expand(4)}, {"a": FOUR}, "a: its elements share memory"),
        ({"a": Accepts(memory=torch.empty(1, device="meta"))}, {"a": 5}, "a: a tensor on meta cannot be filled"),
        (
            torch.nn.Linear(1, 1),
            {"weight": FOUR},
            "the object: Linear here, dict in the checkpoint; give its state_dict",
        ),
    ],
)
def test_differences_are_named(tree, outline, expected):
    assert text(tree, outline).startswith(expected)


def test_an_object_accepts_what_it_converts():
    tree = {"a": Accepts((4,)), "b": Accepts((4,)), "c": Accepts(), "d": 1}
    assert match(tree, {"a": TensorOutline(torch.int8, (4,)), "b": UNREAD, "c": [FOUR], "d": UNREAD}) == []
    assert match(Part(a=1), {"a": 2, "b": FOUR}) == []
    assert match({"betas": (0.9, 0.99)}, {"betas": UNREAD}) == []


def test_many_differences_are_counted():
    assert text(dict.fromkeys("abcdefg", 1), {}).endswith("e: not in the checkpoint; and 2 more")


def test_names_that_are_skipped_are_no_differences():
    skipped = Skipped([], [])
    tree = {"a": torch.zeros(4), "new": 1, "deep": {"b": 1}, "part": Part(c=1)}
    pairs = match(tree, {"a": FOUR, "old": 1, "deep": {"c": 1}, "part": {"d": 1}}, skipped)
    assert [pair.path for pair in pairs] == ["a"]
    assert skipped == (["new", "deep.b", "part.c"], ["old", "deep.c"])
    assert str(skipped).startswith("not in the checkpoint, left unchanged: new, deep.b, part.c; only in the checkpoint")
    assert isinstance(match({"a": torch.zeros(3)}, {"a": FOUR}, Skipped([], [])), Differences)


def test_names_of_wrapped_modules_are_explained():
    assert "fill its .module" in text({"module.a": 1}, {"a": 1})
    assert "save ._orig_mod" in text({"a": 1}, {"_orig_mod.a": 1})
    assert "wraps" not in text({"b": 1}, {"a": 1})


def test_what_contains_itself_is_compared_once():
    tree, outline = {"a": torch.zeros(4)}, {"a": FOUR}
    tree["self"], outline["self"] = tree, outline
    assert len(match(tree, outline)) == 1


class Refusing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("no")


def test_everything_but_tensors_is_put_in():
    tensor, inner = torch.zeros(4), [torch.zeros(1), 1]
    into = {"a": tensor, "deep": {"n": 1}, "list": inner, "tuple": (tensor, 1)}
    loaded = {"a": None, "deep": {"n": 2}, "list": [None, 2], "tuple": (None, 2)}
    assert assign(into, loaded) is into
    assert into["a"] is tensor and into["deep"] == {"n": 2} and into["list"] is inner and inner[1] == 2
    assert into["tuple"][0] is tensor and into["tuple"][1] == 2


def test_what_contains_itself_is_put_in_once():
    into, loaded = {"n": 1, "list": [1]}, {"n": 2, "list": [2]}
    for value in (into, loaded):
        value["self"] = value
        value["list"].append(value["list"])
        value["tuple"] = (value["list"], value)
    assert assign(into, loaded) is into
    assert into["n"] == 2 and into["self"] is into and into["tuple"][1] is into
    assert into["list"][0] == 2 and into["list"][1] is into["list"] is into["tuple"][0]


def test_objects_load_their_states_and_lists_are_replaced_with_them():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    into = {"model": model, "list": [1]}
    assign(into, {"model": other.state_dict(), "list": [1, 2], "more": 1}, source="here")
    assert torch.equal(model.weight, other.weight) and into["list"] == [1, 2] and "more" not in into
    with pytest.raises(
        exceptions.CheckpointError, match=r"^here: deep\.x: Refusing refuses its state; earlier .* restored: no"
    ):
        assign({"deep": {"x": Refusing()}}, {"deep": {"x": {}}}, source="here")
