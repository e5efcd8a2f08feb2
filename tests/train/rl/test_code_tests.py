import pytest

from train.rl.code_tests import CallTest, InputTest, PythonTest, read_tests


def test_each_kind_is_told_by_its_fields():
    tests = [
        {"stdin": "1", "stdout": "2"},
        {"call": "f", "args": [1], "result": None},
        {"code": "assert f(1) == 2"},
    ]

    assert read_tests({"tests": tests, "timeout_s": 2, "memory_mib": 100, "partial": True}) == [
        InputTest(stdin="1", stdout="2"),
        CallTest(call="f", args=[1], result=None),
        PythonTest(code="assert f(1) == 2"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "needs data.tests, a list"),
        ({"tests": []}, "needs data.tests, a list"),
        ({"tests": ["x"]}, r"tests\[0\] must have one of stdout, call, code"),
        ({"tests": [{"stdin": "1"}]}, r"tests\[0\] must have one of"),
        ({"tests": [{"code": "1", "call": "f", "result": 1}]}, r"tests\[0\] must have one of"),
        ({"tests": [{"stdout": "1"}]}, r"tests\[0\] has no stdin"),
        ({"tests": [{"code": "1"}, {"call": "f"}]}, r"tests\[1\] has no result"),
        ({"tests": [{"code": "1", "lang": "py"}]}, "unknown field 'lang'; it has code"),
        ({"tests": [{"stdin": 1, "stdout": "2"}]}, r"tests\[0\].stdin must be of type str"),
        ({"tests": [{"code": "1"}], "timeout_s": 0}, "data.timeout_s=0 must be a positive number"),
        ({"tests": [{"code": "1"}], "memory_mib": True}, "data.memory_mib=True must be a positive"),
        ({"tests": [{"code": "1"}], "partial": 1}, "data.partial=1 must be true or false"),
    ],
)
def test_what_is_no_test_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        read_tests(data)
