"""What each index code costs, and which is cheapest."""

import pytest

from sparsejax import errors
from sparsejax.wire import index_codes
from sparsejax.wire.index_codes import BITMAP, COO8, COO16, COO32


@pytest.mark.parametrize(
    ("code", "capacity", "width", "words"),
    [
        # A word a slot.
        (COO32, 64, 1024, 64),
        (COO32, 1000, 1 << 17, 1000),
        # Half a word a slot, and in one block there is nothing else to tell.
        (COO16, 64, 1024, 32),
        (COO16, 64, 65536, 32),
        # 500 words of lanes, and 1000 ones and 2 zeros in ceil(1002 / 32) = 32 words.
        (COO16, 1000, 1 << 17, 532),
        # One block of 256.
        (COO8, 64, 256, 16),
        # 16 words of lanes, and 64 + 4 bits in 3 words.
        (COO8, 64, 1024, 19),
        # 250 words of lanes, and 1000 + 512 bits in ceil(47.25) = 48 words.
        (COO8, 1000, 1 << 17, 298),
        # A last block that is not whole is a block: 4 + 5 bits in one word.
        (COO8, 4, 1056, 2),
        # A bit a slot of the part, whatever the capacity.
        (BITMAP, 64, 1024, 32),
        (BITMAP, 1000, 1 << 17, 4096),
    ],
)
def test_a_message_has_as_many_words_as_its_code_says(code, capacity, width, words):
    assert code.words(capacity, width) == words
    assert code.lane_words(capacity) + code.string_words(capacity, width) == words


@pytest.mark.parametrize(
    ("capacity", "width", "code"),
    [
        # 256 blocks of 65536: COO 4 words, coo16 2 + 9, coo8 1 + 2049.
        (4, 1 << 24, COO32),
        # COO 32, coo16 16 + 9, ...
        (32, 1 << 24, COO16),
        # One block of 65536. COO 32, coo16 16, coo8 8 + 9, a bitmap 2048.
        (32, 65536, COO16),
        # COO 64, coo16 32, coo8 16 + 10.
        (64, 65536, COO8),
        # The last multiple of 32 where coo8 wins: 1808 + 234 = 2042 words.
        (7232, 65536, COO8),
        # coo8 takes 1816 + 235 = 2051 words and a bitmap 2048.
        (7264, 65536, BITMAP),
        (65536, 65536, BITMAP),
        # One block of 256: coo8 takes 7 words, then 8, as a bitmap does.
        (28, 256, COO8),
        (36, 256, BITMAP),
    ],
)
def test_the_cheapest_code_changes_with_capacity_and_width(capacity, width, code):
    assert index_codes.cheapest(capacity, width, index_codes.parse("auto")) is code


@pytest.mark.parametrize("lane", [4, -8, 40])
def test_a_code_has_whole_bytes_of_each_slot(lane):
    with pytest.raises(errors.ArgumentError, match=f"index code 'new'.* got {lane}"):
        index_codes.IndexCode("new", lane)


def test_a_code_that_is_not_allowed_is_not_chosen():
    assert index_codes.cheapest(64, 65536, [COO32, BITMAP]) is COO32
    assert index_codes.cheapest(64, 65536, index_codes.parse("bitmap")) is BITMAP


@pytest.mark.parametrize("name", ["", "COO8"])
def test_parse_says_which_codes_there_are(name):
    assert index_codes.parse("coo8") == (COO8,)
    known = ", ".join(["auto", *index_codes.CODES])
    with pytest.raises(errors.ArgumentError, match=f"one of {known}, got '{name}'"):
        index_codes.parse(name)
