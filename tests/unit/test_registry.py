import sys
from importlib.metadata import EntryPoint

import pytest

from flowrl import registry
from flowrl.registry import ALGORITHMS, MODELS, REGULARISERS, REWARDS, Registry

ALL = "awm, crd, dgpo, dpo, flow_grpo, nft, paired, ram"


@pytest.fixture
def installed(monkeypatch):
    """The entry points that other packages declare, to be filled by a test."""
    points = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if group == "a.group"])
    return points


def test_a_registered_object_comes_back():
    things = Registry("thing")

    @things.register("first")
    class First: ...

    assert things["first"] is First
    assert things.names() == ("first",)


def test_a_lazy_name_is_imported_only_when_asked_for():
    sys.modules.pop("colorsys", None)
    things = Registry("thing", {"hue": "colorsys:rgb_to_hls"})
    assert things.names() == ("hue",)
    assert "colorsys" not in sys.modules
    function = things["hue"]
    assert function is sys.modules["colorsys"].rgb_to_hls


def test_the_object_behind_a_lazy_name_may_register_itself():
    things = Registry("thing", {"counter": "collections:Counter"})
    counter = things["counter"]
    assert things.register("counter")(counter) is things["counter"]


@pytest.mark.parametrize("taken", ["lazy", "registered", "installed"])
def test_a_second_meaning_of_a_name_is_refused(taken, installed):
    things = Registry("thing", {"lazy": "collections:Counter"}, entry_points="a.group")
    things.register("registered")(dict)
    installed.append(EntryPoint("installed", "collections:deque", "a.group"))
    with pytest.raises(ValueError, match=rf"thing '{taken}' is .* already"):
        things.register(taken)(list)


def test_entry_points_are_found_and_loaded_on_use(installed):
    installed += [
        EntryPoint("good", "collections:deque", "a.group"),
        EntryPoint("broken", "no_such_package_kettle:thing", "a.group"),
    ]
    things = Registry("thing", entry_points="a.group")
    assert things.names() == ("broken", "good")
    assert things["good"] is sys.modules["collections"].deque
    with pytest.raises(ValueError, match="thing 'broken' .*no_such_package_kettle"):
        things["broken"]


def test_an_entry_point_may_ask_for_extras(installed):
    installed += [
        EntryPoint("x", "collections:deque [one, two]", "a.group"),
        EntryPoint("y", "collections:Counter", "a.group"),
    ]
    things = Registry("thing", entry_points="a.group")
    assert things["x"] is sys.modules["collections"].deque
    assert (things.extras("x"), things.extras("y"), things.extras("z")) == ("one, two", "", "")


def test_two_packages_that_claim_one_name_are_both_named(installed):
    installed += [EntryPoint("x", "collections:deque", "a.group"), EntryPoint("x", "collections:Counter", "a.group")]
    with pytest.raises(ValueError, match="'x' is both collections:deque and collections:Counter"):
        Registry("thing", entry_points="a.group").names()


def test_one_package_found_twice_is_no_collision(installed):
    installed += [EntryPoint("x", "collections:deque", "a.group")] * 2
    assert Registry("thing", entry_points="a.group")["x"] is sys.modules["collections"].deque


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("flow_gpro", ["unknown algorithm 'flow_gpro'", "did you mean 'flow_grpo'", f"available: {ALL}"]),
        ("fl\u043ew_grpo", [r"'fl\u043ew_grpo'", "U+043E CYRILLIC SMALL LETTER O", "did you mean 'flow_grpo'"]),
        ("zzz", [f"unknown algorithm 'zzz'; available: {ALL}"]),
        ("\x1b[31mnft", [r"'\x1b[31mnft'"]),
    ],
    ids=["misspelt", "cyrillic o", "nothing near", "escape sequence"],
)
def test_an_unknown_name_is_explained_in_plain_characters(name, parts):
    with pytest.raises(ValueError) as caught:
        ALGORITHMS[name]
    assert all(part in str(caught.value) for part in parts)
    assert str(caught.value).isprintable() and str(caught.value).isascii()


def test_a_file_is_a_module_relative_to_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "json.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n\n"
        "@dataclass\nclass Thing:\n    kind: ClassVar[str] = 'mine'\n    size: int = 3\n\n"
        "def make():\n    return Thing()\n"
    )
    monkeypatch.chdir(tmp_path)
    things = Registry("thing")
    assert things["my/json.py:make"]().size == 3
    assert isinstance(things["my/json.py:make"](), things["my/json.py:Thing"])  # the file ran once
    assert sys.modules["json"].__file__ != str(tmp_path / "my" / "json.py")


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("gone.py:f", None, r"'gone.py:f' cannot be imported: .*{folder}/gone.py"),
        ("a.py:f", "def g(): ...\n_h = g\n", r"'a.py:f': a.py has no 'f'; it has: g$"),
        ("b.py:f", "N = 1\n", r"has no 'f'; it has: no function"),
        ("c.py:f", "import no_such_package_kettle\n", r"'c.py:f' cannot be imported: .*no_such_package_kettle"),
        ("d.py:f", "def f(:\n", r"'d.py:f' cannot be imported: .*d.py, line 1"),
        ("collections:f", None, r"collections has no 'f'; it has: .*OrderedDict"),
        ("no_such_package_kettle.part:f", None, r"cannot be imported: .*no_such_package_kettle"),
    ],
    ids=["no file", "no function", "no function at all", "missing module", "syntax", "no attribute", "no package"],
)
def test_a_target_that_cannot_be_used_is_explained(target, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / target.split(":")[0]).write_text(text)
    with pytest.raises(ValueError, match=message.format(folder=tmp_path)):
        REWARDS[target]


def test_the_names_of_the_package():
    assert set(ALGORITHMS.names()) >= {"flow_grpo", "nft"}
    assert "sd3" in MODELS.names()
    assert set(REGULARISERS.names()) >= {"path_kl", "velocity_kl"}
