import contextlib
import json
import struct

import numpy as np
import pytest

from fbnll.payload import copied, pack, read_only, size, unpack

MESSAGE = {
    "w": {"layer.weight": np.arange(6, dtype="f4").reshape(2, 3), "empty": np.zeros((0, 3), "i8")},
    "flags": np.array([True, False, True]),
    "scalar": np.array(2.5),
    "list": [1, -2.5, None, True, "Φ", [np.array([7], "u1")]],
}


def forged(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return b"fbn1" + struct.pack("<I", len(text)) + text + body


def test_a_message_comes_back_as_it_was_sent():
    back = unpack(pack(MESSAGE))
    assert back["list"][:5] == MESSAGE["list"][:5]
    assert back["list"][5][0].tolist() == [7]
    for part, expected in (
        (back["w"]["layer.weight"], MESSAGE["w"]["layer.weight"]),
        (back["flags"], MESSAGE["flags"]),
        (back["scalar"], MESSAGE["scalar"]),
    ):
        assert part.dtype == expected.dtype
        np.testing.assert_array_equal(part, expected)
    assert back["w"]["empty"].shape == (0, 3)


def test_size_is_the_length_of_the_packed_message():
    assert size(MESSAGE) == len(pack(MESSAGE))


def test_arrays_arrive_read_only_and_aligned():
    for part in (unpack(pack(MESSAGE))["w"]["layer.weight"], read_only(MESSAGE)["w"]["layer.weight"]):
        assert not part.flags.writeable
        assert part.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            part[0, 0] = 1
    MESSAGE["w"]["layer.weight"][0, 0] = 0  # the sender's array is not frozen by it
    assert copied(read_only(MESSAGE))["w"]["layer.weight"].flags.writeable


def test_memory_order_and_byte_order_do_not_matter():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3)).astype(">f8")
    np.testing.assert_array_equal(unpack(pack({"a": array}))["a"], array)


@pytest.mark.parametrize(
    "bad", [{"a": object()}, {"a": np.array(["x"])}, {"a": np.array([1j])}, {"@": 1}, {"a": {1: 2}}, {"a": float("nan")}, {"a": b"x"}]
)
def test_what_cannot_travel_is_refused_by_the_sender(bad):
    with pytest.raises(ValueError, match=r"must|JSON"):
        pack(bad)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"fbn1",
        b"PK\x03\x04 an archive",
        b"\x80\x04\x95 a pickle",
        b"fbn1" + struct.pack("<I", 2**32 - 1) + b"{}",
        forged({"a": {"@": ["f8", 10**12]}}),  # a lying header: no memory is taken
        forged({"a": {"@": ["f8", 10**6, 10**6, 10**6]}}),
        forged({"a": {"@": ["f8", -1]}}),
        forged({"a": {"@": ["f8", 0, -5]}}),
        forged({"a": {"@": ["f8", 1.5]}}),
        forged({"a": {"@": ["f8", True]}}, bytes(8)),
        forged({"a": {"@": ["O", 1]}}, bytes(8)),
        forged({"a": {"@": ["f8", *[1] * 40]}}, bytes(8)),
        forged({"a": {"@": []}}),
        forged({"a": {"@": {"@": 1}}}),
        forged({"a": {"@": ["b1", 1]}}, b"\x02" + bytes(7)),
        forged({"a": 1}, b"left over"),
        forged([1, 2]),
        forged("text"),
        b"fbn1" + struct.pack("<I", 9) + b'{"a":NaN}',
        b"fbn1" + struct.pack("<I", 4) + b"\xff\xfe\x00\x01",
        b"fbn1" + struct.pack("<I", 200_000) + b"[" * 200_000,
        pack(MESSAGE)[:-1],
        pack(MESSAGE) + b"x",
    ],
)
def test_hostile_bytes_are_refused_in_one_sentence(data):
    with pytest.raises(ValueError, match="must") as error:
        unpack(data)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_every_cut_and_many_flips_of_a_message_give_a_message_or_a_value_error():
    data = pack(MESSAGE)
    rng = np.random.default_rng(0)
    flipped = [bytearray(data) for _ in range(500)]
    for variant in flipped:
        variant[rng.integers(len(data))] ^= 1 << rng.integers(8)
    for variant in [data[:n] for n in range(len(data))] + [bytes(variant) for variant in flipped]:
        with contextlib.suppress(ValueError):
            assert isinstance(unpack(variant), dict)


@pytest.mark.parametrize("depth", [300, 900, 2_000, 200_000])
def test_a_header_nested_deep_is_refused(depth):
    header = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    data = b"fbn1" + struct.pack("<I", len(header)) + header
    with contextlib.suppress(ValueError):
        unpack(data)


@pytest.mark.parametrize("header", [b'{"a":1e999}', b'{"a":-1e999}', b'{"a":NaN}', b'{"a":{"@":["f4",0,549755813888,549755813888]}}'])
def test_numbers_that_are_not_finite_and_shapes_that_nothing_could_hold_are_refused_in_our_words(header):
    with pytest.raises(ValueError, match="must be"):
        unpack(b"fbn1" + struct.pack("<I", len(header)) + header)
