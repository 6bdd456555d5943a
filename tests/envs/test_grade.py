import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trivium.envs.grade import says


@pytest.mark.parametrize(
    ("text", "wanted", "want"),
    [
        ("The answer is 42.", "42", True),
        ("42", "42", True),
        ("(42)", "42", True),
        ("12 + 30 = 42, is it not?", "42", True),
        ("142", "42", False),
        ("421", "42", False),
        ("42nd", "42", False),
        ("42.5", "42", False),
        ("It is 3.42", "42", False),
        ("4,200", "4", False),
        ("1,500", "500", False),
        ("one, 500", "500", True),
        ("-42", "42", False),
        ("40 - 82 = -42.", "-42", True),
        ("5-42", "42", False),
        ("555-1234", "555", False),
        ("Call 555-1234.", "555-1234", True),
        ("2024-03-17 is a Monday.", "Monday", True),
        ("Mondays", "Monday", False),
        ("monday", "Monday", False),
        ("Ada Baker", "Ada", True),
        ("a.b", "a b", False),
        ("axb", "a.b", False),
        ("I have no tool for that.", "no tool", True),
        ("I have no tools for that.", "no tool", False),
        ("41 42", "41 42", True),
        ("", "42", False),
    ],
)
def test_what_is_wanted_stands_as_a_whole(text, wanted, want):
    assert says(text, wanted) is want


@given(number=st.integers(-(10**6), 10**6), other=st.integers(-(10**6), 10**6))
@example(number=500, other=1500)
def test_of_a_number_no_other_number_says_it(number, other):
    for shown in (str(other), f"{other:,}", f"{other}.5", f"0.{abs(other)}"):
        assert says(f"It is {shown}.", str(number)) == (shown == str(number))


@given(
    words=st.text(max_size=20),
    before=st.sampled_from(["", " ", "\n", "(", "= "]),
    after=st.sampled_from(["", ".", "!", ")"]),
)
def test_it_is_found_wherever_words_end(words, before, after):
    """Whatever characters it has: none of them means anything in a pattern."""
    wanted = f"x{words}x"
    assert says(f"{before}{wanted}{after}", wanted)
