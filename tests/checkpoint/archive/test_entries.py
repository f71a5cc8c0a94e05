"""Loads selected entries of a file, and fills existing tensors in place if they match."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.saved_objects import (
    QUIET,
    blank,
    flip,
    load,
    payload_of,
    random_tensor,
    raw,
    same,
    save,
)
from torchobj import exceptions
from torchobj.checkpoint.archive import entries
from torchobj.checkpoint.archive.entries import select, selected
from torchobj.exceptions import ConfigError

pytestmark = [QUIET, pytest.mark.usefixtures("planned"), pytest.mark.providers("s3", GCS_IN_MATRIX)]

MODEL = {
    "model": {
        "layer1.weight": torch.rand(300_000),
        "layer1.bias": torch.rand(3),
        "layer10.weight": torch.rand(300_000),
    },
    "optimizer": {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.rand(9)}}, "param_groups": [{"lr": 0.1}]},
    "epoch": 3,
}


@pytest.mark.providers("s3", "gs")
def test_keys_select_entries_and_those_below_them(bucket, control):
    save(bucket, MODEL)
    control.clear_requests()
    model = MODEL["model"]
    expected = {"model": {"layer1.weight": model["layer1.weight"], "layer1.bias": model["layer1.bias"]}}
    assert same(expected, load(bucket, keys=["model.layer1"]))
    # Not layer10, which is as large.
    assert sum(request.bytes_sent for request in control.requests()) < 1_200_000 + 700_000
    assert same({"model": model}, load(bucket, keys=["model", "model.layer1.weight"]))
    assert same({"optimizer": {"state": MODEL["optimizer"]["state"]}}, load(bucket, keys=["optimizer.state.0"]))
    assert same({"optimizer": MODEL["optimizer"], "epoch": 3}, load(bucket, keys=["epoch", "optimizer"]))
    assert load(bucket, keys=[]) == {}
    for keys in ((key for key in ["epoch"]), {"epoch"}, {"epoch": None}.keys(), ("epoch",)):
        assert load(bucket, keys=keys) == {"epoch": 3}


def test_many_keys_are_selected_in_linear_time():
    class Counted(str):
        __slots__ = ()
        comparisons = 0

        def __eq__(self, other):
            Counted.comparisons += 1
            return str.__eq__(self, other)

        def startswith(self, *given):
            Counted.comparisons += 1
            return str.startswith(self, *given)

        __hash__ = str.__hash__

    tree = {f"layer{number}.weight": {"value": number, 1: number} for number in range(2000)}
    keys = [Counted(name) for name in tree] + ["layer1.weight.1"]
    assert entries.select(tree, keys, "u") == [(name,) for name in tree]
    assert Counted.comparisons < 10 * len(tree)
    assert entries.select(tree, ["layer1", "layer10.weight.value"], "u") == [
        ("layer1.weight",), ("layer10.weight", "value")
    ]  # fmt: skip


def test_an_unknown_key_raises_with_similar_names(bucket):
    save(bucket, MODEL)
    with pytest.raises(
        exceptions.ConfigError, match=r"'model\.layer2\.weight'; similar names: .*model\.layer1\.weight"
    ):
        load(bucket, keys=["epoch", "model.layer2.weight"])
    for keys in ("epoch", b"epoch", 5, [5], (key for key in [5])):
        with pytest.raises(exceptions.ConfigError, match="must be a list of names"):
            load(bucket, keys=keys)
    save(bucket, [1, 2])
    with pytest.raises(exceptions.ConfigError, match="not a mapping"):
        load(bucket, keys=["0"])


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inner for tensor in tensors_of(part)]


@pytest.mark.parametrize("verify", [True, False])
def test_existing_tensors_are_filled_in_place(bucket, verify):
    base = torch.rand(8, 8)
    value = {
        **MODEL,
        "views": (base[2:4], base.t(), base[:, 3]),
        "scalar": torch.tensor(4.0),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "bits": random_tensor(torch.bfloat16, (6,)),
    }
    save(bucket, value)
    into = blank(value)
    into["views"] = (torch.zeros(8, 2).t(), torch.zeros(8, 8), torch.zeros(8))
    before = tensors_of(into)
    versions = [tensor._version for tensor in before]
    assert load(bucket, into=into, verify=verify) is into
    assert all(left is right for left, right in zip(tensors_of(into), before, strict=True))
    assert all(tensor._version > version for tensor, version in zip(before, versions, strict=True))
    for left, right in zip(tensors_of(into), tensors_of(value), strict=True):
        assert torch.equal(left.to_dense(), right.to_dense()) or raw(left) == raw(right)
    assert into["epoch"] == 3
    assert into["optimizer"]["param_groups"] == [{"lr": 0.1}]


def test_tied_tensors_and_parameters_are_filled(bucket):
    weight = torch.rand(5, 5)
    save(bucket, {"a": weight, "b": weight, "c": torch.rand(5)})
    tied = torch.nn.Parameter(torch.zeros(5, 5))
    into = {"a": tied, "b": tied, "c": torch.nn.Parameter(torch.zeros(5))}
    load(bucket, into=into)
    assert torch.equal(tied, weight)
    both = torch.zeros(10)
    save(bucket, {"low": torch.ones(6), "high": torch.full((6,), 2.0)})
    # They overlap: the shared bytes are those of one of them.
    load(bucket, into={"low": both[:6], "high": both[4:]})
    assert both[:4].eq(1).all() and both[6:].eq(2).all() and both[4] == both[5]


def test_keys_and_into_can_be_combined(bucket):
    save(bucket, MODEL)
    into = {"model": {"layer1.bias": torch.zeros(3)}}
    load(bucket, keys=["model.layer1.bias"], into=into)
    assert torch.equal(into["model"]["layer1.bias"], MODEL["model"]["layer1.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda into: into["model"].update({"layer1.bias": torch.zeros(4)}),
            r"model\.layer1\.bias: .*\(4,\) here, .*\(3,\) in",
        ),
        (
            lambda into: into["model"].update({"layer1.bias": torch.zeros(3, dtype=torch.int32)}),
            r"int32 of .*float32 of",
        ),
        (lambda into: into["model"].update({"layer1.bias": torch.zeros(3, device="meta")}), r"on meta"),
        (lambda into: into["model"].update({"layer1.bias": torch.zeros(1).expand(3)}), r"bias: .*share memory"),
        (
            lambda into: into.update({"optimizer": torch.nn.Linear(1, 1)}),
            r"Linear here, dict in .* give its state_dict\(\)",
        ),
        (
            lambda into: into.pop("optimizer"),
            r"optimizer: only in the checkpoint; keys=\['model', 'epoch'\] loads a part",
        ),
        (lambda into: into["model"].update({"layer1.bias": 3}), r"int here, Tensor in the checkpoint"),
        (lambda into: into["model"].pop("layer1.bias"), r"model\.layer1\.bias: only in the checkpoint"),
        (lambda into: into.update({"more": 1}), r"more: not in the checkpoint"),
        (lambda into: into["optimizer"].update({"param_groups": []}), r"list of 0 here, list of 1 in the checkpoint"),
        (lambda into: into.update({"epoch": torch.zeros(3)}), r"epoch: Tensor here, int in the checkpoint"),
    ],
)
def test_mismatches_raise_before_a_byte_is_overwritten(bucket, change, message):
    save(bucket, MODEL)
    into = blank(MODEL)
    change(into)
    with pytest.raises(exceptions.ConfigError, match=f"into does not match: .*{message}"):
        load(bucket, into=into)
    assert into["model"]["layer1.weight"].eq(9).all()
    assert into["epoch"] is None or isinstance(into["epoch"], torch.Tensor)


def test_an_object_that_contains_itself_is_filled(bucket):
    def cyclic(number):
        shared = (torch.full((2,), float(number)), number)
        value = {"shared": [shared, shared], "number": number}
        value["self"] = [value, (value,)]
        return value

    save(bucket, cyclic(1))
    assert load(bucket, keys=["number"]) == {"number": 1}
    into = cyclic(0)
    load(bucket, into=into)
    assert into["self"][0] is into["self"][1][0] is into
    assert into["number"] == 1
    assert into["shared"][0] is into["shared"][1]
    assert (into["shared"][0][0].tolist(), into["shared"][0][1]) == ([1.0, 1.0], 1)


def test_a_flipped_byte_is_detected_with_into_too(bucket):
    save(bucket, MODEL)
    flip(bucket, "ckpt.pt", payload_of(bucket, "ckpt.pt", MODEL["model"]["layer10.weight"]) + 77)
    with pytest.raises(exceptions.IntegrityError, match=r"model\.layer10\.weight"):
        load(bucket, "flipped.pt", into=blank(MODEL))


def test_a_tensor_that_was_saved_on_meta_cannot_fill_another():
    torchobj.save({"a": torch.ones(2), "b": torch.empty(3, device="meta")}, "memory://load-part/meta.pt")
    into = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(exceptions.ConfigError, match="b: was saved on the meta device, without values"):
        torchobj.load("memory://load-part/meta.pt", into=into)
    assert torch.equal(into["a"], torch.zeros(2))


def test_selected_entries_keep_the_versions_of_a_modules_state_dict(bucket):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    save(bucket, {"model": model.state_dict(), "plain": model.state_dict()["1.weight"]})
    assert load(bucket, keys=["model"])["model"]._metadata == model.state_dict()._metadata
    part = load(bucket, keys=["model.0"])["model"]
    assert list(part) == [name for name in model.state_dict() if name.startswith("0.")]
    assert part._metadata == model.state_dict()._metadata
    # Without the version of BatchNorm, its counter would be expected to be missing.
    fresh = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    fresh.load_state_dict(part)
    save(bucket, model.state_dict())
    assert load(bucket, keys=["1"])._metadata == model.state_dict()._metadata


def test_names_of_wrapped_modules_are_explained(bucket):
    model = torch.nn.Linear(2, 2)
    compiled = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    cases = [
        (compiled, model.state_dict(), "'_orig_mod.' in the names there .* torch.compile .* save ._orig_mod"),
        (model.state_dict(), compiled, "'_orig_mod.' in the names here .* torch.compile .* fill its ._orig_mod"),
        (wrapped, model.state_dict(), "'module.' in the names there .* DistributedDataParallel .* save .module"),
        (compiled, wrapped, "'module.' in the names here .*'_orig_mod.' in the names there "),
    ]
    for saved, into, text in cases:
        save(bucket, saved)
        with pytest.raises(exceptions.ConfigError, match=text):
            load(bucket, into=into)
    save(bucket, {"other": torch.ones(2)})
    with pytest.raises(exceptions.ConfigError) as caught:
        load(bucket, into=model.state_dict())
    assert "wraps" not in str(caught.value)


trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b", 1]), inner, max_size=3), max_leaves=9
)


def leaves_of(tree, path=()):
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, inner in tree.items() for key, value in leaves_of(inner, (*path, name)).items()}


@settings(max_examples=200)
@given(trees, st.lists(st.sampled_from(["a", "b", "1", "a.b", "a.b.a", "b.1"]), max_size=3))
def test_selected_entries_are_those_that_the_keys_name(tree, keys):
    if not isinstance(tree, dict):
        return
    try:
        paths = select(tree, keys, "s3://b/k")
    except ConfigError:
        return
    dotted = {path: ".".join(map(str, path)) for path in leaves_of(tree)}
    expected = {
        path: value
        for path, value in leaves_of(tree).items()
        if any(f"{dotted[path]}.".startswith(f"{key}.") for key in keys)
    }
    assert leaves_of(selected(tree, paths)) == expected
