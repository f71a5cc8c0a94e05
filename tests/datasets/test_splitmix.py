"""Random words are those of SplitMix64."""

from torchobj.datasets.splitmix import mixed_word


def test_draws_are_those_of_splitmix64():
    # The first outputs for seed 0 of the reference implementation of Sebastiano Vigna.
    assert [mixed_word(0, number) for number in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
