import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import GleanerSettings, SamplingSettings
from gleaner.tasks.keys import cache_key, canonical_json, code_version, digest_json

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=12
)


def test_the_canonical_form_is_written_out():
    assert canonical_json({"b": [1, 2.5, None], "a": "ü"}) == '{"a":"ü","b":[1,2.5,null]}'.encode()


def test_the_digest_is_sha256_of_the_canonical_form():
    # printf '{"a":1}' | sha256sum
    assert digest_json({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=6))
def test_the_order_of_a_dict_does_not_matter(value):
    assert digest_json(value) == digest_json(dict(reversed(value.items())))


@settings(max_examples=50, deadline=None)
@given(VALUES, VALUES)
def test_values_share_a_digest_only_if_their_json_is_the_same(one, other):
    assert (digest_json(one) == digest_json(other)) == (canonical_json(one) == canonical_json(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ([], {}),
        (None, "null"),
        ([1, [2]], [[1], 2]),
        (0.1, 0.1 + 1e-17 + 1e-16),
    ],
)
def test_values_of_another_type_or_shape_have_another_digest(one, other):
    assert digest_json(one) != digest_json(other)


@dataclass
class Thing:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"value\.a\.b\[1\] is a set"),
        ({"a": float("nan")}, r"value\.a is nan"),
        ([float("inf")], r"value\[0\] is inf"),
        ({"a": Thing()}, r"value\.a is a Thing"),
        ({"a": {1: 2}}, r"value\.a has the key 1"),
        ({"f": lambda: 1}, r"value\.f is a function"),
        ({"b": b"x"}, r"value\.b is a bytes"),
    ],
)
def test_what_cannot_be_keyed_is_refused_by_its_path(value, path):
    with pytest.raises(ConfigurationError, match=path):
        digest_json(value)


def test_every_part_of_a_key_counts():
    base = {"seed": 1, "prompts": "ab", "sampling": SamplingSettings(), "torch": "2.13.0"}
    changed = [
        {"seed": 2},
        {"prompts": "ac"},
        {"sampling": SamplingSettings(temperature=0.7)},
        {"torch": "2.14.0"},
        {"extra": None},
    ]
    keys = {cache_key("rollouts", "code", **(base | change)) for change in [{}, *changed]}
    keys |= {cache_key("rollouts", "other code", **base), cache_key("verdicts", "code", **base)}
    assert len(keys) == 8
    assert cache_key("rollouts", "code", **base) in keys
    assert all(key.startswith(("rollouts-", "verdicts-")) for key in keys)


def test_a_key_that_cannot_be_computed_names_the_part():
    with pytest.raises(ConfigurationError, match=r"rollouts\.ids is a set"):
        cache_key("rollouts", "code", ids={1})
    with pytest.raises(ConfigurationError, match="no code version"):
        cache_key("rollouts", "")


def test_whole_settings_can_be_keyed():
    assert digest_json(GleanerSettings()) == digest_json(GleanerSettings().model_dump(mode="json"))


def test_a_code_version_is_the_same_in_another_process():
    program = "from gleaner.tasks.keys import code_version; print(code_version('gleaner.models.engines'))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == code_version("gleaner.models.engines")


def test_a_code_version_reads_modules_and_imports_none_of_them():
    program = """
import sys
from gleaner.tasks.keys import code_version
code_version("gleaner.models", "gleaner.tasks.store")
print(sorted({"torch", "transformers", "polars", "s3fs", "prefect"} & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_code_version_changes_with_a_helper_that_is_only_imported(tmp_path):
    """The copy of the package is changed in its records module, which `tables` imports."""
    package = tmp_path / "gleaner"
    for name in ("conf", "models", "tasks"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    import gleaner.conf.errors
    import gleaner.conf.schema
    import gleaner.models.records
    import gleaner.models.tables
    import gleaner.tasks.keys

    for module in (
        gleaner.conf.errors,
        gleaner.conf.schema,
        gleaner.models.records,
        gleaner.models.tables,
        gleaner.tasks.keys,
    ):
        target = package.joinpath(*module.__name__.split(".")[1:]).with_suffix(".py")
        target.write_text(Path(module.__file__).read_text(encoding="utf-8"), encoding="utf-8")

    def versions():
        program = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.path.insert(0, {str(tmp_path)!r})
from gleaner.tasks.keys import code_version
print(code_version("gleaner.models.tables"), code_version("gleaner.models.records"))
"""
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return found.stdout.split()

    before = versions()
    with open(package / "conf" / "schema.py", "a") as file:
        file.write("# settings are keyed by value\n")
    assert versions() == before
    with open(package / "models" / "records.py", "a") as file:
        file.write("# a change\n")
    tables_version, records_version = versions()
    assert tables_version != before[0]
    assert records_version != before[1]


def test_a_code_version_takes_packages_and_own_files(tmp_path):
    own = tmp_path / "reward.py"
    own.write_text("def reward(): return 1\n")
    first = code_version("gleaner.models.methods", str(own))
    assert first != code_version("gleaner.models.methods")
    other = tmp_path / "other.py"
    other.write_text("def reward(): return 2\n")
    assert code_version(str(own)) != code_version(str(other))


@pytest.mark.parametrize(
    "module", ["gleaner.models.nothing", "no_such_package.x", "math", "missing/reward.py"]
)
def test_a_module_without_source_is_refused(module):
    with pytest.raises(ConfigurationError, match=module.split(".")[0]):
        code_version(module)
