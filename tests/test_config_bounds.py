"""Whatever a config holds, reading it takes little time and memory, and ends in a config or in a short ConfigError."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest

from conftest import REPOSITORY
from rl_training import ConfigError, TrainConfig, load_config
from rl_training.config import MOST_STEPS
from rl_training.errors import read_document
from rl_training.runtime.loading import build_config
from test_config import GOOD, problems, write  # noqa: F401  a fixture

LONGEST_MESSAGE = 20_000  # ten problems, each with a place, a key and a message
VALID = [path.read_text() for path in sorted((REPOSITORY / "configs").glob("*/*.yaml"))]


def bomb(levels: int, width: int = 10) -> str:
    """Lists of aliases: `levels` lines that stand for width ** levels values."""
    lines = [f"a0: &a0 [{', '.join(['lol'] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def merge_bomb(levels: int, width: int = 10) -> str:
    lines = ["m0: &m0 {k: 1}"]
    lines += [f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * width)}]}}" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


CHAIN = "c0: &c0 [1]\n" + "".join(f"c{i}: &c{i} [*c{i - 1}]\n" for i in range(1, 2000))
LONG_TEXT = "s: &s " + "x" * 10_000 + "\nt: [" + ", ".join(["*s"] * 10_000) + "]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bomb(9) + "tags: *a8\n", "line 5: more than 20,000 keys and values"),
        (bomb(40, 2), "keys and values"),
        (merge_bomb(9), "keys and values"),
        (CHAIN, "more than 50 levels of nesting"),
        ("tags: " + "[" * 60 + "]" * 60, "line 1: more than 50 levels of nesting"),
        ("tags: " + "[" * 20_000, "levels of nesting"),
        ("- " * 100_000, "levels of nesting"),
        (LONG_TEXT, "line 2: more than 500,000 characters"),
        ("tags: &x [a, *x]", "line 1: the anchor 'x' contains itself"),
        ("algo: &x {a: {b: *x}}", "line 1: the anchor 'x' contains itself"),
        ("seed: 1\ntags: !!bool foo", "line 2: 'foo' is not a valid bool"),
        ("seed: !!int ''", "line 1: '' is not a valid int"),
        ("seed: !!float ''", "line 1: '' is not a valid float"),
        ("seed: !!timestamp foo", "line 1: 'foo' is not a valid timestamp"),
        ("seed: 2020-13-45", "line 1: '2020-13-45' is not a valid timestamp"),
        ("seed: " + "9" * 400, "line 1: a number of 400 characters"),
        ("seed: 0x" + "f" * 5000, "a number of 5,002 characters"),
        ("seed: 1" + ":59" * 20_000, "a number of 60,001 characters"),
        ("x" * 600_000, "more than 500,000 characters"),
    ],
    ids=lambda x: x[:20],
)
def test_what_is_too_much_is_refused_before_it_is_built(write, text, expected):  # noqa: F811
    path = write(text)
    tracemalloc.start()
    found = "\n".join(problems(path))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected in found
    assert len(found) < LONGEST_MESSAGE
    assert used < 100e6


def test_a_file_without_end_is_not_read_to_it(tmp_path):
    (tmp_path / "huge.yaml").write_bytes(b"#" * 50_000_000)
    tracemalloc.start()
    found = problems(tmp_path / "huge.yaml")
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "too long for a config" in found[0]
    assert used < 20e6


def test_aliases_are_still_good_for_what_they_are_good_for(write):  # noqa: F811
    text = GOOD + "env_kwargs: {wrappers: &w {time_limit: 9}}\neval_env_kwargs: {wrappers: *w}\n"
    assert load_config(write(text)).eval_env_kwargs == {"wrappers": {"time_limit": 9}}


def test_a_long_list_of_points_fits(write):  # noqa: F811
    points = ", ".join(f"[{100 * i}, {1 / (i + 1)}]" for i in range(1000))
    text = GOOD + f"  ent_coef: {{kind: piecewise, points: [{points}]}}\n"
    assert len(load_config(write(text)).algo_kwargs["ent_coef"]["points"]) == 1000


def test_of_many_problems_the_first_ten_are_shown_and_the_rest_counted(write):  # noqa: F811
    found = problems(write(GOOD + "".join(f"nonsense_{i}: 1\n" for i in range(5000))))
    assert len(found) == 11
    assert found[-1] == "and 4,990 more"
    assert "nonsense_9" in found[9]
    assert len(problems(write(GOOD + "".join(f"nonsense_{i}: 1\n" for i in range(10))))) == 10


@pytest.mark.parametrize(
    "line",
    [
        "tags: " + "x" * 100_000,
        "seed: [" + "1, " * 9_000 + "]",
        "x" * 100_000 + ": 1",
        "? " + "x" * 100_000 + "\n: 1",
        "env_id: " + "x" * 100_000,
        "algo: " + "x" * 100_000,
        "device: " + "x" * 100_000,
        "seed: *" + "x" * 100_000,
        "seed: !" + "x" * 100_000 + " 1",
        "env_kwargs: {wrappers: {atari: [" + "1, " * 9_000 + "]}}",
        "algo_kwargs: {clip_coef: [" + "1, " * 9_000 + "]}",
        "algo_kwargs: {num_steps: " + "x" * 100_000 + "}",
        "algo_kwargs: {clip_coef: {kind: " + "x" * 100_000 + "}}",
        "algo_kwargs: {hidden_sizes: [" + "x, " * 9_000 + "]}",
    ],
    ids=lambda x: x[:30],
)
def test_a_message_shows_the_beginning_of_a_long_value(write, line):  # noqa: F811
    key = line.split(":")[0]
    kept = [old for old in GOOD.split("algo_kwargs")[0].splitlines() if not old.startswith(key)]
    assert len("\n".join(problems(write("\n".join([*kept, line]))))) < LONGEST_MESSAGE


def test_overrides_are_bounded_too(write):  # noqa: F811
    for value in ("[" * 10_000, "!!bool foo", "9" * 400, "&x [*x]", "x" * 100_000):
        found = "\n".join(problems(write(GOOD), overrides=[f"seed={value}"]))
        assert found.startswith("--set seed=")
        assert len(found) < LONGEST_MESSAGE


HUGE = 10**400  # no float is as large


@pytest.mark.parametrize(
    "kwargs",
    [
        {"clip_coef": HUGE},
        {"clip_coef": -HUGE},
        {"update_epochs": HUGE},
        {"clip_coef": {"kind": "linear", "start": HUGE}},
        {"clip_coef": {"kind": "linear", "end": HUGE}},
        {"clip_coef": {"kind": "linear", "duration": HUGE}},
        {"clip_coef": {"kind": "step", "every": HUGE}},
        {"clip_coef": {"kind": "step", "milestones": [HUGE]}},
        {"clip_coef": {"kind": "cyclic", "period": HUGE}},
        {"clip_coef": {"kind": "piecewise", "points": [[0, 1], [HUGE, 2]]}},
        {"clip_coef": [{"kind": "linear", "duration": HUGE}, {"kind": "constant"}]},
        {"clip_coef_warmup_steps": HUGE},
        {"clip_coef": {"kind": "linear", "warmup": {"steps": 5, "from": HUGE}}},
        {"num_steps": HUGE},
        {"hidden_sizes": [HUGE]},
        {"log_std_init": HUGE},
    ],
    ids=str,
)
def test_whole_numbers_beyond_floats_are_refused(kwargs):
    data = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 1000, "algo_kwargs": kwargs}
    with pytest.raises(ConfigError, match=next(iter(kwargs))) as caught:
        build_config(data)
    assert len(str(caught.value)) < LONGEST_MESSAGE


@pytest.mark.parametrize(
    "key", ["total_timesteps", "seed", "num_envs", "eval_interval", "schedule_horizon", "num_threads", "eval_episodes"]
)
def test_so_are_those_of_the_top_level(key):
    data = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 1000, "algo_kwargs": {"clip_coef": "linear"}}
    with pytest.raises(ConfigError, match=key):
        build_config(data | {key: HUGE})


def test_the_longest_run_can_be_scheduled():
    schedule = {"kind": "linear", "start": 0.2, "end": 0.1, "warmup": {"steps": "5%"}}
    config = TrainConfig("ppo", "CartPole-v1", MOST_STEPS, algo_kwargs={"clip_coef": schedule})
    assert build_config({"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": MOST_STEPS, "algo_kwargs": {}})
    assert config.horizon == MOST_STEPS


NASTY = [
    "!!bool foo", "!!int x", "!!float ''", "!!timestamp x", "!!binary x", "!!set {a, b}", "!!omap [a: 1]", "!!null x",
    "!!python/name:os.system", "!x y", "*x", "&x [*x]", "&x x", "<<: *x", "[[[[[[[[", "{{{{", "[", "}", "? ", "- ",
    "1e400", "-1e400", ".inf", ".nan", "9" * 120, "0x" + "f" * 90, "1:30:00", "0b11", "0o17", "1_0", "~", "null", "",
    "true", "'7'", "2020-01-01", "2020-13-45", "{kind: linear}", "{kind: [linear]}", "{1: 2}", "{[a]: b}", "[true]",
    "auto", "linear", "1%", "101%", "-1", "0", "0.5", "1e6", "\t", "\0", "\u2028", "\U0001f600", "é", "|", ">", "%",
    "@", "`", "=", "---", "...", "#", '"\\x"', '"\\ud800"', "mine:Mine-v0", ":", "::", "a: b: c",
]  # fmt: skip


def mutated(text: str, rng: random.Random) -> str:
    """A valid config with a few mistakes in it."""
    for _ in range(rng.randint(1, 3)):
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        kind = rng.randrange(7)
        if kind == 0 and ":" in lines[at]:
            lines[at] = lines[at].split(":")[0] + ": " + rng.choice(NASTY)
        elif kind == 1:
            lines.insert(at, " " * rng.randrange(5) + rng.choice(NASTY))
        elif kind == 2:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind == 3:
            del lines[at]
        elif kind == 4:
            lines[at] = lines[at].replace(lines[at][: rng.randint(0, len(lines[at]))], "", 1)
        else:
            text = "\n".join(lines)
            place = rng.randrange(len(text) + 1)
            size = rng.choice((0, 0, 1, 5))
            text = text[:place] + rng.choice([*NASTY, *"[]{}:,&*!|>'\"%@ \n"]) + text[place + size :]
            continue
        text = "\n".join(lines) or "a"
    return text + "\n"


def refusal(path, **options) -> str | None:
    """The message with which a config is refused; None if it is read."""
    try:
        load_config(path, allow_import=False, **options)
    except ConfigError as error:
        return str(error)
    return None


def test_nothing_but_a_config_error_comes_out_of_damaged_configs(tmp_path):
    rng = random.Random(0)
    path, read = tmp_path / "run.yaml", 0
    for _ in range(400):
        path.write_text(mutated(rng.choice(VALID), rng), encoding="utf-8", errors="surrogatepass")
        message = refusal(path)
        read += message is None
        assert message is None or 0 < len(message) < LONGEST_MESSAGE
    assert 20 < read < 380


def test_nothing_but_a_config_error_comes_out_of_damaged_overrides(tmp_path):
    rng = random.Random(1)
    keys = ["seed", "tags", "algo_kwargs", "algo_kwargs.clip_coef", "algo_kwargs.num_steps", "env_kwargs.wrappers"]
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    for _ in range(300):
        override = f"{rng.choice(keys)}={rng.choice(['', '[', '{a: '])}{rng.choice(NASTY)}"
        message = refusal(path, overrides=[override])
        assert message is None or 0 < len(message) < LONGEST_MESSAGE


def test_numbers_in_the_data_are_those_of_the_text():
    data = read_document("a: [1e3, 3e-4, 1_000, 0x10, .inf, 1:30]", "x").data["a"]
    assert data[:5] == [1000.0, 3e-4, 1000, 16, math.inf]
    assert data[5] == 90
