"""Tools: each answer a number worked out by hand, and none raises whatever it is given."""

import datetime
import json
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.envs.synth.tools import FIELDS, TOOLS, UNITS, WEEKDAYS, Person, Toolbox, number_text, office

BOX = Toolbox(
    people=(
        Person(id=12, name="Ada Baker", record={"phone": "555-1", "city": "Oslo"}),
        Person(id=7, name="Ben King", record={"phone": "555-2", "city": "Rome"}),
    )
)


def calculate(expression):
    return BOX.run("calculate", {"expression": expression})


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("2 + 3", "5"),
        ("2 - 3", "-1"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("8 - 3 - 2", "3"),
        ("-2 * -3", "6"),
        ("  7/2 ", "3.5"),
        ("1 / 3", "0.3333"),
        ("2 / 3", "0.6667"),
        ("0.1 + 0.2", "0.3"),  # in decimals, where float64 has 0.30000000000000004
        ("1.005 * 100", "100.5"),
        ("0.00005", "0.0001"),  # half up
        ("0.00004", "0"),
        ("0 - 0.00001", "0"),
        ("0 * -5", "0"),
        ("1_000 + 1", "1001"),
        ("1e3", "1000"),
        ("100 / 10", "10"),
        ("99999 * 99999", "9999800001"),
        ("123456789012345678901234 - 1", "123456789012345678901233"),
    ],
)
def test_expressions_by_hand(expression, want):
    assert calculate(expression) == want


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("1 / 0", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ("2 ** 3", "more than numbers and"),
        ("7 // 2", "more than numbers and"),
        ("x + 1", "more than numbers and"),
        ("True + 1", "more than numbers and"),
        ("1j", "more than numbers and"),
        ("'a' * 3", "more than numbers and"),
        ("__import__('os')", "more than numbers and"),
        ("[1][0]", "more than numbers and"),
        ("+1", "more than numbers and"),
        ("1 +", "is no expression"),
        ("", "is no expression"),
        ("1 2", "is no expression"),
        ("1; 2", "more than numbers and"),
        ("1or 2", "more than numbers and"),
        ("2\0", "more than numbers and"),
        ("\ud800", "more than numbers and"),
        ("\u0661 + 1", "more than numbers and"),  # a digit of another script
        ("(" * 150 + "1" + ")" * 40, "is no expression"),
        ("1" * 31, "more than numbers and"),
        ("1" * 201, "at most 200 characters"),
        (3, "at most 200 characters"),
        (None, "at most 200 characters"),
        ("0x10", "more than numbers and"),
        ("1e24", "more than 24 digits"),
        ("1" * 30 + " * 10", "more than 24 digits"),
        ("1e999999 * 1e999999", "cannot be worked out"),
    ],
)
def test_what_is_no_expression_is_told(expression, word):
    got = calculate(expression)
    assert got.startswith("error: ") and word in got


@pytest.mark.parametrize(
    "expression",
    [
        "1e999999",
        "1e99999999999999",
        "1e-99999999999999",
        "0e99999999999999",
        "9e999999 * 9",
        "1" + " * 9e99" * 25,
        "-" * 199 + "1",
        "(" * 99 + "1" + ")" * 99,
        "+".join("1" * 100),
        "1e999999999999999999",
    ],
)
def test_huge_exponents_and_depths_cost_no_time_and_no_room(expression):
    """1e99999999999 written out would be a hundred gigabytes."""
    begun = time.process_time()
    assert len(calculate(expression)) < 300
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    ("value", "want"),
    [("12.500", "12.5"), ("100", "100"), ("1E+2", "100"), ("-0", "0"), ("0E+9", "0"), ("-1.00005", "-1.0001"), ("2.00001", "2")],
)  # fmt: skip
def test_a_number_is_written_without_zeros_and_exponents(value, want):
    assert number_text(Decimal(value)) == want


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e24", "-1e24"])
def test_what_has_no_digits_or_too_many_is_no_text(value):
    with pytest.raises(ValueError, match="^the result has more than 24 digits$"):
        number_text(Decimal(value))


@pytest.mark.parametrize(
    ("value", "unit", "to", "want"),
    [
        (2, "kilometers", "meters", "2000"),
        (1, "miles", "kilometers", "1.6093"),
        (12, "meters", "feet", "39.3701"),  # 12 / 0.3048
        (1, "feet", "inches", "12"),
        (3, "yards", "feet", "9"),
        (16, "ounces", "pounds", "1"),
        (1.5, "kilograms", "grams", "1500"),
        (1, "gallons", "liters", "3.7854"),
        (2, "weeks", "days", "14"),
        (90, "minutes", "hours", "1.5"),
        (100, "celsius", "fahrenheit", "212"),
        (-40, "fahrenheit", "celsius", "-40"),
        (5, "meters", "meters", "5"),
        (5, "km", "mi", "3.1069"),  # in short, in the singular, in capitals: as people write
        (1, "Mile", "foot", "5280"),
        (2, "lbs", "kg", "0.9072"),
        (37, "°C", "f", "98.6"),
        (3, "h", "min", "180"),
        (0.00015, "meters", "meters", "0.0002"),  # as it is written: the float is a little less, and would go down
    ],
)
def test_conversions_by_hand(value, unit, to, want):
    assert BOX.run("convert", {"value": value, "unit": unit, "to": to}) == want


def test_every_unit_is_there_and_back_again():
    for units in UNITS.values():
        for unit in units:
            for to in units:
                there = BOX.run("convert", {"value": 40, "unit": unit, "to": to})
                back = Decimal(BOX.run("convert", {"value": float(there), "unit": to, "to": unit}))
                size = Decimal(BOX.run("convert", {"value": 1, "unit": to, "to": unit}))
                if unit not in UNITS["temperature"]:  # half a unit of the fourth decimal, there and back
                    assert abs(back - 40) <= Decimal("0.00005") * max(1, size + 1) + Decimal("0.00005")
                else:
                    assert abs(back - 40) < Decimal("0.001")


@pytest.mark.parametrize(
    ("value", "unit", "to", "word"),
    [
        (1, "meters", "grams", "cannot convert 'meters' to 'grams'"),
        (1, "celsius", "meters", "cannot convert"),
        (1, "parsecs", "meters", "cannot convert 'parsecs'"),
        ("1", "meters", "feet", "value: wanted a number, got '1'"),
        (True, "meters", "feet", "value: wanted a number, got True"),
        (1, ["meters"], "feet", "cannot convert"),
        (1, "meters", {}, "cannot convert"),
        (float("nan"), "meters", "feet", "more than 24 digits"),
        (float("inf"), "meters", "feet", "more than 24 digits"),
        (1e308, "miles", "inches", "more than 24 digits"),
        (10**4000, "miles", "inches", "more than 24 digits"),
    ],
    ids=range(11),
)
def test_what_cannot_be_converted_is_told(value, unit, to, word):
    got = BOX.run("convert", {"value": value, "unit": unit, "to": to})
    assert got.startswith("error: ") and word in got


def test_dates_by_hand():
    def days(start, end):
        return BOX.run("days_between", {"start": start, "end": end})

    assert days("2024-02-28", "2024-03-01") == "2" and days("2023-02-28", "2023-03-01") == "1"  # a leap year
    assert days("2024-01-01", "2025-01-01") == "366" and days("2024-01-02", "2024-01-01") == "-1"
    assert BOX.run("weekday", {"date": "1970-01-01"}) == "Thursday"
    assert BOX.run("weekday", {"date": "2000-02-29"}) == "Tuesday"
    for wrong in ("soon", "2023-02-29", "", None, 20240101, [], "01/02/2024"):
        assert days(wrong, "2024-01-01") == f"error: wanted a date such as 2024-03-17, got {wrong!r}"
        assert BOX.run("weekday", {"date": wrong}).startswith("error: wanted a date")


@given(st.dates(min_value=datetime.date(1900, 1, 1), max_value=datetime.date(2100, 1, 1)), st.integers(-9999, 9999))
def test_a_weekday_is_the_one_before_a_week_later(date, num_days):
    other = date + datetime.timedelta(days=num_days)
    one, two = (BOX.run("weekday", {"date": each.isoformat()}) for each in (date, other))
    assert (WEEKDAYS.index(two) - WEEKDAYS.index(one) - num_days) % 7 == 0
    assert BOX.run("days_between", {"start": date.isoformat(), "end": other.isoformat()}) == str(num_days)


def test_people_are_found_by_their_name_and_read_by_their_id():
    assert BOX.run("find_person", {"name": "Ada Baker"}) == BOX.run("find_person", {"name": "ada baker"}) == "12"
    assert BOX.run("get_field", {"id": 12, "field": "city"}) == "Oslo"
    assert BOX.run("get_field", {"id": 7.0, "field": "phone"}) == "555-2"
    for arguments, word in (
        ({"id": 12, "field": "age"}, "a record has phone, city, and no 'age'"),
        ({"id": 12, "field": ["city"]}, "a record has phone, city, and no ['city']"),
        ({"id": 12, "field": {}}, "a record has phone, city, and no {}"),
        ({"id": 99, "field": "city"}, "nobody has the id 99"),
        ({"id": "12", "field": "city"}, "nobody has the id '12'"),
        ({"id": [], "field": "city"}, "nobody has the id []"),
    ):
        assert BOX.run("get_field", arguments) == f"error: {word}"
    for name in ("Ada", "", None, 12, ["Ada Baker"]):
        assert BOX.run("find_person", {"name": name}) == f"error: nobody is named {name!r}"
    assert Toolbox(people=(Person(id=1, name="x", record={"city": "y"}),)).run("get_field", {"id": True, "field": "city"}).startswith("error: ")  # fmt: skip


def test_a_tool_that_is_none_and_arguments_that_are_none_are_told():
    assert BOX.run("fly", {}) == "error: there is no tool fly"
    for arguments in ({}, {"start": "2024-01-01"}, {"start": "2024-01-01", "end": "2024-01-01", "more": 1}):
        assert BOX.run("days_between", arguments) == "error: wanted start, end"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [12, 7, "Ada Baker", "city", "meters", "feet", "celsius", "2024-01-01", "1 + 1", "9" * 30, "1e99999", 1e300, -0.0]
)
PIECES = st.lists(st.sampled_from([*"0123456789.()+-*/ eE_jx,\n\"'", "**", "//", "1e9", "True", "not "]), max_size=60)


@given(name=st.sampled_from([*TOOLS, "nothing"]), data=st.data())
def test_no_tool_raises_whatever_it_is_given(name, data):
    wanted = list((TOOLS[name].parameters if name in TOOLS else {}).get("properties", {}))
    names = data.draw(st.just(wanted) | st.lists(st.sampled_from([*wanted, "more"]), unique=True))
    arguments = {key: data.draw(LIKELY | JSON | PIECES.map("".join)) for key in names}
    answer = office().run(name, arguments) if data.draw(st.booleans()) else BOX.run(name, arguments)
    assert isinstance(answer, str) and answer


@given(PIECES.map("".join))
def test_no_expression_raises_and_each_is_a_number_or_an_error(expression):
    answer = calculate(expression)
    assert answer.startswith("error: ") or Decimal(answer).is_finite()


def test_declarations_are_schemas_of_what_the_tools_take():
    for name, tool in TOOLS.items():
        assert tool.name == name
        json.dumps(tool.to_json())
        properties = tool.parameters["properties"]
        assert tool.parameters["required"] == list(properties)
        assert {kind["type"] for kind in properties.values()} <= {"string", "number"}


def test_the_office_has_everybody_once_and_every_field():
    people = office().people
    assert (
        office() == office() and len({person.id for person in people}) == len({person.name for person in people}) == 6
    )
    for person in people:
        assert set(person.record) == set(FIELDS)
        assert office().run("find_person", {"name": person.name}) == str(person.id)
        for field in FIELDS:
            assert office().run("get_field", {"id": person.id, "field": field}) == person.record[field]
