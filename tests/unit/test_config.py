"""Config files: what they may say, what the user is told, and that a resolved copy is the same run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algorithms._surrogates import PPO, PSPO, SPO
from flowrl.algorithms._surveyed import LPO, M2PO, P3O
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.algorithms.nft import NFT
from flowrl.config import Config, load, resolve
from flowrl.config_file import PACKAGED, ConfigError, override, read, write
from flowrl.policy import LoRA
from flowrl.sample import Sampler, Window
from flowrl.scorers import RewardSpec


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """The settings of a model that needs no import of diffusers."""

    path: str
    guidance: float = 1.0


TINY = f"{__name__}:Tiny"


def raw(*overrides: str) -> dict[str, Any]:
    smallest = {
        "run": "demo",
        "steps": 20,
        "model": {"name": TINY, "path": "here"},
        "data": {"prompts": "shapes/train", "prompts_per_step": 4, "group_size": 4},
        "sampler": {"steps": 8, "kernel": "flow_sde", "eta": 0.7},
        "rewards": [{"name": "jpeg_size"}],
        "algorithm": {"name": "flow_grpo"},
        "optimiser": {"lr": 1e-4, "updates": 2},
    }
    return override(smallest, overrides)


def config(*overrides: str) -> Config:
    return resolve(raw(*overrides))


def problems(*overrides: str) -> list[str]:
    """The lines of the report, without its head."""
    with pytest.raises(ConfigError) as error:
        config(*overrides)
    head, *lines = str(error.value).split("\n  ")
    return lines or [head.removeprefix("the config: ")]


# a valid config


def test_blocks_are_of_the_classes_that_use_them():
    c = config("sampler.window={size: 3, start: random}", "model.lora={rank: 8, targets: [to_q, to_k]}")
    assert c.model == Tiny(path="here")
    assert c.lora == LoRA(rank=8, targets=("to_q", "to_k"))
    assert c.sampler == Sampler(kernel="flow_sde", eta=0.7, window=Window(size=3, start="random"))
    assert c.rewards == (RewardSpec(name="jpeg_size"),)
    assert (c.algorithm_name, c.algorithm) == ("flow_grpo", FlowGRPO())
    assert config("algorithm={name: nft, beta: 2}", "sampler=null", "sampler={}").algorithm == NFT(beta=2)


SURROGATES = [
    ((), PPO()),
    (("algorithm.surrogate={clip: 2}",), PPO(clip=2.0)),
    (("algorithm.surrogate.name=spo", "algorithm.surrogate.clip=0.03"), SPO(clip=0.03)),
    (("algorithm.surrogate={name: pspo, alpha: 0.2}",), PSPO(alpha=0.2)),
    (("algorithm.surrogate.name=p3o",), P3O()),
    (("algorithm.surrogate={name: m2po, floors: [0, 1]}",), M2PO(floors=(0.0, 1.0))),
    (("algorithm.surrogate={kappa: 3, name: lpo}",), LPO(kappa=3.0)),
]


@pytest.mark.parametrize(("changes", "surrogate"), SURROGATES, ids=[s.name for _, s in SURROGATES])
def test_a_surrogate_is_of_the_class_of_its_name_and_is_written_with_all_of_it(changes, surrogate):
    c = config(*changes)
    assert c.algorithm == FlowGRPO(surrogate=surrogate)
    assert list(c.dump()["algorithm"]["surrogate"]) == [f.name for f in fields(surrogate)]
    assert resolve(c.dump()) == c


def test_a_surrogate_of_ones_own_is_found_by_its_file(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import dataclass\nfrom flowrl.algorithms._surrogates import Surrogate\n"
        f"@dataclass(frozen=True)\nclass Mine(Surrogate):\n    name: str = '{mine}:Mine'\n    width: float = 1.0\n"
    )
    c = config(f"algorithm.surrogate={{name: '{mine}:Mine', width: 2}}")
    assert (type(c.algorithm.surrogate).__name__, c.algorithm.surrogate.width) == ("Mine", 2.0)
    assert resolve(c.dump()) == c


def test_an_integer_is_a_number_and_zero_charges_are_dropped():
    c = config("optimiser.lr=1", "regularise={velocity_kl: 0, path_kl: 2}")
    assert c.optimiser.lr == 1.0 and isinstance(c.optimiser.lr, float)
    assert c.regularise == {"path_kl": 2.0}


@pytest.mark.parametrize(
    ("run", "folder"), [("demo", "runs/demo"), ("here/demo", "here/demo"), ("/abs/demo", "/abs/demo")]
)
def test_a_run_has_its_folder(run, folder):
    assert config(f"run={run}").folder == Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["shapes/demo", "shapes/nft", "shapes/flow_grpo", "shapes/branch_grpo", "shapes/paired"]
)
def test_packaged_recipes_are_valid_and_their_resolved_copies_equal(name, tmp_path):
    from flowrl.models.sd3 import SD3

    recipe = load(name)
    (tmp_path / "copy.yaml").write_text(recipe.to_yaml())
    assert isinstance(recipe.model, SD3) and recipe.model.path == "shapes-sd3"
    assert load(tmp_path / "copy.yaml") == recipe


words = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20)
RUNS = st.fixed_dictionaries(
    {
        "run": st.sampled_from(["1e5", "007", "yes", "null", "1:30", "~", "a b", "=", "<<", "0x1f", "1_000", "\u2603"]),
        "steps": st.integers(1, 10**9),
        "data": st.fixed_dictionaries(
            {"prompts": words, "prompts_per_step": st.integers(1, 99), "group_size": st.integers(1, 99)},
            optional={"shared_noise": st.booleans() | st.floats(0, 1), "dedupe": st.booleans()},
        ),
        "optimiser": st.fixed_dictionaries(
            {"lr": st.floats(0, 1, exclude_min=True)},
            optional={"betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2), "warmup": st.integers(0, 9)},
        ),
        "rewards": st.lists(
            st.fixed_dictionaries(
                {"name": st.just("jpeg_size"), "weight": st.floats(allow_nan=False, allow_infinity=False)},
                optional={"options": st.dictionaries(words, words | st.integers() | st.booleans() | st.none())},
            ),
            min_size=1,
        ),
    },
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "evaluate": st.fixed_dictionaries({}, optional={"prompts": words | st.none(), "seeds": st.integers(1, 9)}),
        "compute": st.fixed_dictionaries({}, optional={"rows_per_forward": st.integers(1, 99) | st.just("auto")}),
        "regularise": st.dictionaries(st.sampled_from(["velocity_kl", "path_kl"]), st.floats(0, 10)),
        "track": st.lists(st.sampled_from(["jsonl", "wandb"])),
    },
)  # fmt: skip


@given(changes=RUNS)
def test_a_resolved_copy_is_the_same_run(changes, tmp_path_factory):
    copy = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    wanted = resolve({**raw(), **changes})
    copy.write_text(wanted.to_yaml(), encoding="utf-8")
    assert load(copy) == wanted
    assert resolve(wanted.dump()).dump() == wanted.dump()


def test_a_resolved_copy_holds_every_key():
    dumped = config().dump()
    assert set(dumped) == {f.name for f in fields(Config)} - {"model_name", "algorithm_name", "lora"}
    assert dumped["model"] == {"name": TINY, "lora": None, "path": "here", "guidance": 1.0}
    surrogate = {"name": "ppo", "clip": 1e-4}
    assert dumped["algorithm"] == {"name": "flow_grpo", "surrogate": surrogate, "logp_scale": 1.0, "guard": False}
    assert json.loads(json.dumps(dumped)) == dumped


def test_importing_the_config_loads_no_torch():
    script = "import flowrl.config, sys; print([m for m in ('torch', 'diffusers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# what is refused

MEANT = [
    ("sampler.eat=1", "sampler.eat = 1: unknown key; did you mean sampler.eta?"),
    ("eta=0.7", "eta = 0.7: unknown key; did you mean sampler.eta?"),
    ("optimiser.group_size=4", "optimiser.group_size = 4: unknown key; did you mean data.group_size?"),
    ("stepz=3", "stepz = 3: unknown key; did you mean steps?"),
    ("model.pth=x", "model.pth = 'x': unknown key; did you mean model.path?"),
    ("model.lora={rnk: 3}", "model.lora.rnk = 3: unknown key; did you mean model.lora.rank?"),
    ("algorithm.surrogate.clop=1", "algorithm.surrogate.clop = 1: unknown key; did you mean algorithm.surrogate.clip?"),
    (
        "algorithm.surrogate={name: lpo, tua: 1}",
        "surrogate.tua = 1: unknown key; did you mean algorithm.surrogate.tau?",
    ),
    ("algorithm.surrogate.nmae=spo", "nmae = 'spo': unknown key; did you mean algorithm.surrogate.name?"),
    ("algorithm.surrogate.name=sppo", "unknown surrogate 'sppo'; did you mean 'spo'?"),
    ("algorithm.surrogate={name: pspo, clip: 1}", "clip is a key of ppo and spo; those of pspo are name, alpha"),
    ("policy.old.rat=0", "policy.old.rat = 0: unknown key; did you mean policy.old.rate?"),
    ("sampler.window={size: 2, strat: 1}", "sampler.window.strat = 1: unknown key; did you mean sampler.window.start?"),
    ("rewards=[{name: shapes, wieght: 1}]", "rewards.0.wieght = 1: unknown key; did you mean rewards.weight?"),
    ("save.zzzz=1", "save.zzzz = 1: unknown key; the keys of save are every, keep, best"),
    ("l\u0435r=1", "'l\\u0435r' = 1: unknown key; did you mean optimiser.lr?"),
    ("regularise.velocity_k=1", "did you mean 'velocity_kl'?"),
    ("algorithm.name=nfd", "did you mean 'nft'?"),
    ("rewards=[{name: shaeps}]", "did you mean 'shapes'?"),
]


@pytest.mark.parametrize(("change", "said"), MEANT, ids=[change for change, _ in MEANT])
def test_a_wrong_name_is_told_the_nearest(change, said):
    (line,) = problems(change)
    assert said in line


REFUSED = [  # an override, the key, the value and the fix that the user is told
    ("optimiser.lr=", "optimiser.lr = null", "give a value or remove the line"),
    ("optimiser.lr='1e-4'", "optimiser.lr = '1e-4'", "without quotes"),
    ("optimiser.lr=100", "optimiser.lr = 100", "less than or equal to 1"),
    ("optimiser.lr=0", "optimiser.lr = 0", "greater than 0"),
    ("optimiser.lr=.nan", "optimiser.lr = nan", "a finite number"),
    ("optimiser.updates=0", "optimiser.updates = 0", "greater than 0"),
    ("optimiser.betas=[0.9, 1.0]", "optimiser.betas.1 = 1.0", "less than 1"),
    ("steps=-5", "steps = -5", "greater than 0"),
    ("steps=2.0", "steps = 2.0", "an integer"),
    ("steps=yes", "steps = true", "unquoted yes, no, on and off are read as booleans"),
    ("steps=1:30", "steps = '1:30'", "an integer"),
    ("seed=-1", "seed = -1", "greater than or equal to 0"),
    ("run=7", "run = 7", "put it in quotes"),
    ("run=../up", "run = '../up'", "a path without .."),
    ('run="a\\0b"', r"run = 'a\x00b'", "such as demo"),
    ("run='.'", "run = '.'", "such as demo"),
    ("data=null", "data = null", "a block of keys"),
    ("data.prompts=''", "data.prompts = ''", "not empty"),
    ("data.shared_noise=2", "data.shared_noise = 2", "less than or equal to 1"),
    ("data.shared_noise='no'", "data.shared_noise = 'no'", "a number"),
    ("sampler.branch=2.5", "sampler.branch = 2.5", "an integer or a block of names and values"),
    ("sampler.branch={'7': 2}", "sampler.branch is {7: 2}", "tree branching at an ODE step"),
    ("compute.precision=no", "compute.precision = false", "'fp32', 'bf16' or 'fp16'"),
    ("compute.rows_per_forward=0.5", "compute.rows_per_forward = 0.5", "an integer or 'auto'"),
    ("rewards=[]", "rewards = []", "at least one reward"),
    ("rewards=shapes", "rewards = 'shapes'", "a list"),
    ("rewards=[{name: shapes, weight: .inf}]", "rewards.0.weight = inf", "a finite number"),
    ("evaluate.rewards=[{name: shaeps}]", "evaluate.rewards.0 = {'name': 'shaeps'}", "did you mean 'shapes'?"),
    ("track=[jsonl, tensorbord]", "track.1 = 'tensorbord'", "'tensorboard'"),
    ("regularise.velocity_kl=-1", "regularise.velocity_kl = -1", "greater than or equal to 0"),
    ("sampler.eta=-0.7", "sampler.eta is -0.7", "at least 0"),
    ("sampler.eta=.nan", "sampler.eta = nan", "a finite number"),
    ("algorithm.surrogate.clip=0", "algorithm.surrogate.clip is 0.0", "must be positive"),
    ("algorithm.surrogate={name: pspo, alpha: 1}", "algorithm.surrogate.alpha is 1.0", "in [0, 1)"),
    ("algorithm.surrogate={name: m2po, m2: -1}", "algorithm.surrogate.m2 is -1.0", "must be positive"),
    ("algorithm.surrogate={name: m2po, floors: [2, 1]}", "algorithm.surrogate.floors is [2.0, 1.0]", "in [0, 1]"),
    ("algorithm.surrogate={name: lpo, kappa: 0}", "algorithm.surrogate.kappa is 0.0", "must be positive"),
    ("algorithm.surrogate={name: 7}", "algorithm.surrogate = {'name': 7}", "available: lpo, m2po"),
    ("algorithm.surrogate=ppo", "algorithm.surrogate = 'ppo'", "a block of keys"),
    ("algorithm.logp_scale='2'", "algorithm.logp_scale = '2'", "without quotes"),
    ("algorithm.guard='yes'", "algorithm.guard = 'yes'", "true or false"),
    ("model.guidance=yes", "model.guidance = true", "unquoted yes, no, on and off are read as booleans"),
    ("algorithm={}", "algorithm.name", "add it"),
    ("algorithm.name=7", "algorithm.name = 7", "put it in quotes"),
    ("algorithm.name='flowrl.flow:step'", "algorithm 'flowrl.flow:step'", "name the class of its settings"),
]


@pytest.mark.parametrize(("change", "said", "fix"), REFUSED, ids=[change for change, _, _ in REFUSED])
def test_a_wrong_value_is_told_with_its_key_and_a_fix(change, said, fix):
    (line,) = problems(change)
    assert line.startswith(said) and fix in line.removeprefix(said)


def test_all_problems_are_told_at_once_one_a_line():
    lines = problems("steps=-5", "sampler.eat=1", "algorithm.surrogate.clop=1", "rewards=[{name: a}, {name: b}]", "x=1")
    assert [line.split()[0] for line in lines] == [
        "steps", "sampler.eat", "rewards.0", "rewards.1", "algorithm.surrogate.clop", "x",
    ]  # fmt: skip


def test_a_key_with_dots_is_not_taken_for_a_nested_one():
    with pytest.raises(ConfigError, match=r"'model.name': unknown key; nest it"):
        resolve({**raw(), "model.name": TINY})


def test_a_huge_or_hostile_value_is_neither_expanded_nor_echoed():
    deep: Any = "x"
    for _ in range(9):
        deep = [deep] * 3
    with pytest.raises(ConfigError) as error:
        resolve({**raw(), "\x1b[2J" * 1000: "\x1b]0;" + "x" * 10**6, "b": deep})
    assert len(str(error.value)) < 2000 and str(error.value).replace("\n", "").isprintable()


# the text of a file


def parsed(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(tmp_path / "a.yaml")


def test_scalars_are_what_they_look_like(tmp_path):
    numbers, texts = "[1e-4, 1E5, -.5, 1., 1_000, -3, .inf]", "[1:30:00, 007, 0x10, 1.2.3, 2024-01-01, =, <<, 1e, .]"
    text = f"a: {numbers}\nb: {texts}\nc: [no, On, ~, '1']"
    assert parsed(tmp_path, text) == {
        "a": [1e-4, 1e5, -0.5, 1.0, 1000, -3, float("inf")],
        "b": ["1:30:00", "007", "0x10", "1.2.3", "2024-01-01", "=", "<<", "1e", "."],
        "c": [False, True, None, "1"],
    }


@given(st.dictionaries(words, words | st.floats(allow_nan=False) | st.integers() | st.booleans() | st.none()))
def test_what_is_written_reads_back_equal(tmp_path_factory, data):
    if data:
        assert parsed(tmp_path_factory.getbasetemp(), write(data)) == data


def test_bom_and_crlf_change_nothing(tmp_path):
    text = write(raw())
    assert parsed(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()) == raw()


TEXTS = [
    ("a: 1\nb: 2\na: 3\nb: 4\n", [r"line 3: the key 'a' stands in line 1 and in line 3", r"line 4: .*line 2"]),
    ("a: {b: 1,\n b: 2}", [r"line 2: the key 'b'"]),
    ("a: &x [1]\nb: *x\n", [r"line 1: anchors", r"line 2: anchors"]),
    ("a: !!python/object/apply:os.system ['touch no']", [r"line 1: the tag '!!python/object/apply:os.system'"]),
    ("a: !x 1\nb: !!str 2", [r"line 1: the tag '!x'", r"line 2: the tag '!!str'"]),
    ("a:\n  b: 1\n\tc: 1\n \td: 1\n", [r"line 3: a tab", r"line 4: a tab"]),
    ("no: 1\n", [r"line 1: the key 'no' is read as bool; put it in quotes"]),
    ("[a]: 1\n", [r"line 1: the key"]),
    ("", [r"empty config"]),
    ("# only a comment\n", [r"empty config"]),
    ("- a\n- b\n", [r"the top level is \['a', 'b'\]; write keys"]),
    ("a: 1\n---\nb: 1\n", [r"line 2: not YAML: but found another document"]),
    ("a: [1\nb: 2\n", [r"line 2: not YAML"]),
    ("a: 'x\x00y'", [r"not YAML"]),
    (b"a: caf\xe9", [r"byte 6 is not UTF-8; save the file as UTF-8"]),
    ("a: " + "[" * 5000, [r"not YAML"]),
]


@pytest.mark.parametrize(("text", "said"), TEXTS, ids=range(len(TEXTS)))
def test_bad_text_is_refused_with_its_file_and_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        parsed(tmp_path, text)
    assert "a.yaml" in str(error.value) and str(error.value).replace("\n", "").isprintable()
    for pattern in said:
        assert re.search(pattern, str(error.value))


@pytest.mark.parametrize("name", ["shapes/demo", "shapes/demo.yaml", "configs/shapes/demo", "configs/shapes/demo.yaml"])
def test_packaged_configs_are_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packaged = read(PACKAGED / "shapes" / "demo.yaml")
    assert read(name) == packaged
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("steps: 3")
    assert read(name) == {"steps": 3}, "a file of the current folder comes first"


@pytest.mark.parametrize(
    ("name", "near"), [("shapes/dmeo", "'shapes/demo'"), ("mien.yaml", "'mine.yaml'"), ("qqq", "shapes/nft")]
)
def test_a_missing_file_is_told_where_it_was_looked_for_and_what_is_near(name, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("steps: 3")
    with pytest.raises(ConfigError) as error:
        read(name)
    assert str(tmp_path / name) in str(error.value) and near in str(error.value)


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match="directory; give a config file"):
        read(tmp_path)


# overrides


def test_overrides_set_nested_keys_as_yaml_and_leave_the_original():
    before = raw()
    after = override(
        before, ["optimiser.lr=1e-3", "sampler.window.size=3", "rewards=[{name: a}]", "evaluate=", "run=a=b"]
    )
    assert after["optimiser"] == {"lr": 1e-3, "updates": 2}
    assert after["sampler"]["window"] == {"size": 3}
    assert after["rewards"] == [{"name": "a"}]
    assert after["evaluate"] is None and after["run"] == "a=b"
    assert before == raw()


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("steps", "write key=value"),
        ("a..b=1", "write key=value"),
        ("=1", "write key=value"),
        ("steps.x=1", "steps = 20 is no block of keys"),
        ("rewards.0.weight=2", "rewards = .* give all of it: rewards=..."),
        ("steps=[1", "not YAML"),
        ("steps=!!python/name:os.system", "the tag"),
    ],
)
def test_bad_overrides_are_named(assignment, said):
    with pytest.raises(ConfigError, match=said) as error:
        override(raw(), [assignment])
    assert repr(assignment) in str(error.value)
