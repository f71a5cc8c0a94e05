"""Arrays are equal to those of NumPy."""

import numpy
import pytest

import torchobj
from tests.support.decoding import saved
from torchobj import decode
from torchobj.decode import arrays

ARRAYS = {
    "C": numpy.arange(24, dtype="<i2").reshape(2, 3, 4),
    "Fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "big endian": numpy.arange(3, dtype=">f8"),
    "scalar": numpy.array(5),
    "empty": numpy.zeros((0, 3)),
    "text": numpy.array(["a", "bc"]),
    "fields": numpy.array([("a", 1)], dtype=[("x", "U3"), ("y", "i4")]),
    "time": numpy.array(["2020-01-01"], dtype="M8[D]"),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_share_the_memory_of_the_object(array):
    buffer = torchobj.Buffer(saved(numpy.save, array))
    found = decode.npy(buffer)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert numpy.array_equal(found, array)
    if array.size:
        assert found.strides == array.strides
        assert numpy.shares_memory(found, numpy.frombuffer(buffer, numpy.uint8))
    assert found.flags.writeable
    assert not decode.npy(bytes(buffer)).flags.writeable


@pytest.mark.filterwarnings("ignore:Stored array in format")
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy_is_read(version):
    data = saved(lambda file, it: numpy.lib.format.write_array(file, it, version), numpy.arange(5))
    assert decode.npy(data).tolist() == list(range(5))


def test_arrays_that_are_pickles_are_refused():
    objects = numpy.array([{}], dtype=object)
    with pytest.raises(ValueError, match="an npy file of Python objects, object: these are pickles"):
        decode.npy(saved(lambda file, it: numpy.save(file, it, allow_pickle=True), objects))
    with pytest.raises(ValueError, match="an npy file of Python objects"):
        decode.npz(saved(lambda file, it: numpy.savez(file, a=it), objects))


def test_damaged_arrays_are_value_errors():
    data = saved(numpy.save, numpy.arange(5))
    with pytest.raises(ValueError, match=r"a truncated npy file: 39 of 40 bytes of an array of shape \(5,\)"):
        decode.npy(data[:-1])
    for wrong in (
        b"",
        b"x" * 50,
        data[:7],
        data[:20],
        b"\x93NUMPY\x09\x00" + data[8:],
        b"\x93NUMPY\x02\x00" + b"\xff" * 9,
    ):
        with pytest.raises(ValueError):
            decode.npy(wrong)
    with pytest.raises(ValueError, match=r"not an npz file, but a single array: use torchobj\.decode\.npy"):
        decode.npz(data)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("shape", ["(-1,)", "(2, -3)", "(1 << 70,)", "(99999999999999,)"])
def test_shapes_that_the_bytes_do_not_have_are_value_errors(version, shape):
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape.replace('1 << 70', str(1 << 70))}, }}\n".encode()
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    with pytest.raises(ValueError, match="a damaged npy file: an array of shape|a truncated npy file"):
        decode.npy(b"\x93NUMPY" + bytes([version, 0]) + length + text + bytes(64))


def npy_of(version, header):
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + bytes(64)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("shape", [
    "3", "None", "('a',)", "(1.5,)", "(True, 99999)", "(0, 9223372036854775807, 9223372036854775807)",
    f"({'0, ' * 70})", "(9223372036854775808, 0)", "(4611686018427387904, 4)", "(,)", "(1", "[" * 300, "-" * 9000 + "1",
    "(" * 9000, "'" * 3, "\n  1", "{}", "0x", "1 if 1 else 2",
])  # fmt: skip
def test_headers_that_describe_no_array_are_value_errors(version, shape):
    with pytest.raises(ValueError):
        decode.npy(npy_of(version, f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n"))


@pytest.mark.parametrize("descr", ["|S0", "<U0", "|V0"])
def test_elements_without_bytes_are_limited_by_the_size_of_the_file(descr):
    for shape, fits in (("(5, 0)", True), ("(7, 3)", True), ("(4611686018427387904, 4)", False), ("(99999,)", False)):
        data = npy_of(1, f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n")
        if fits:
            assert decode.npy(data).size in (0, 21)
        else:
            with pytest.raises(ValueError, match=r"a damaged npy file: an array of shape \("):
                decode.npy(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("descr", [
    "3", "'|O'", "'x9'", "[('a', '<f8', (-1,))]", "('<f8', (1000000000, 1000000000))", "'|V9223372036854775807'",
    "[('a', '<f8')] * 2", "'<M8[x]'", "[('a', 'V0'), ('a', 'V0')]", "'<f8,'", "(1, 2, 3)", "{'a': 1}",
])  # fmt: skip
def test_types_that_numpy_has_not_are_value_errors(descr):
    with pytest.raises(ValueError):
        decode.npy(npy_of(1, f"{{'descr': {descr}, 'fortran_order': False, 'shape': (9,), }}\n"))


@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_fields_with_any_names_share_the_memory_of_the_object():
    array = numpy.array([(1, 2)], dtype=[("値é\\", "i4"), ("y", "i4")])
    data = saved(lambda file, it: numpy.lib.format.write_array(file, it, (3, 0)), array)
    found = decode.npy(data)
    assert found.dtype == array.dtype
    assert found.tolist() == [(1, 2)]
    assert numpy.shares_memory(found, numpy.frombuffer(data, numpy.uint8))


def test_damaged_archives_are_value_errors():
    data = bytearray(saved(lambda file, it: numpy.savez_compressed(file, a=it), numpy.arange(5000)))
    changed = data.copy()
    changed[100:140] = b"\xff" * 40
    for wrong in (b"", b"x" * 50, data[:-30], data[: len(data) // 2], changed):
        with pytest.raises(ValueError, match="not an npz file, or damaged|truncated"):
            decode.npz(bytes(wrong))


def test_arrays_of_archives_are_as_numpy_loads_them():
    data = saved(lambda file, it: numpy.savez_compressed(file, a=it, b=it[:1]), numpy.arange(5000))
    found = decode.npz(data)
    assert list(found) == ["a", "b"]
    assert numpy.array_equal(found["a"], numpy.arange(5000))
    assert found["a"].flags.writeable


def test_the_arrays_of_an_archive_are_limited(monkeypatch):
    data = saved(lambda file, it: numpy.savez_compressed(file, a=it, b=it), numpy.zeros(100_000))
    assert decode.npz(data)["b"].shape == (100_000,)
    monkeypatch.setattr(arrays, "_MAX_NPZ_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"1600256 bytes of arrays, at most 1000000: load it with numpy\.load"):
        decode.npz(data)
    plain = saved(lambda file, it: numpy.savez(file, a=it, b=it), numpy.zeros(100_000))
    assert decode.npz(plain)["b"].shape == (100_000,)
