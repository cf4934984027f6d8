"""Every action space on a nested observation, from training to the policy in someone's own loop."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rl_training import ALGORITHMS, load_policy, train
from rl_training.errors import InputError


class Spaces(gym.Env):
    """Rewards an action of any space for being close to what a Dict observation asks for."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = gym.spaces.Dict(
            {
                "wanted": gym.spaces.MultiBinary(3),
                "picture": gym.spaces.Box(0, 255, (1, 40, 40), np.uint8),
                "more": gym.spaces.Tuple([gym.spaces.Discrete(3, start=2), gym.spaces.Box(-1, 1, (2, 2))]),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.obs = self.observation_space.sample()
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = float(np.mean(np.equal(np.asarray(action).flatten()[:3] > 0, self.obs["wanted"][: np.size(action)])))
        self.obs = self.observation_space.sample()
        return self.obs, reward, False, bool(self.np_random.random() < 0.2), {}


SPACES = {
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3, 2]),
    "MultiBinary": gym.spaces.MultiBinary(3),
    "Box": gym.spaces.Box(-2, 3, (3,)),
    "DiscreteFromFive": gym.spaces.Discrete(2, start=5),
}
for name, space in SPACES.items():
    gym.register(f"Every{name}-v0", entry_point=Spaces, kwargs={"action_space": space})


def supported(algo, name):
    return type(SPACES[name]).__name__ in ALGORITHMS[algo].recipe.actions.split(", ")


CASES = [(algo, name) for algo in sorted(ALGORITHMS) for name in SPACES]


@pytest.mark.parametrize(("algo", "name"), [case for case in CASES if not supported(*case)])
def test_an_action_space_that_is_not_supported_is_an_error_with_a_remedy(algo, name, tiny_config):
    with pytest.raises(InputError, match=r"use (sac|dqn|ppo)") as error:
        train(tiny_config(algo, {"env_id": f"Every{name}-v0"}), progress="silent")
    assert type(SPACES[name]).__name__ in str(error.value)


@pytest.mark.parametrize(("algo", "name"), [case for case in CASES if supported(*case)])
def test_every_action_space_on_a_nested_observation(algo, name, tiny_config):
    config = {"env_id": f"Every{name}-v0", "total_timesteps": 48, "eval_episodes": 1}
    result = train(tiny_config(algo, config), progress="silent")
    policy = load_policy(result.run_dir)
    env = Spaces(SPACES[name])
    obs, _ = env.reset(seed=1)
    for _ in range(5):
        obs, *_ = env.step(policy.act(obs, deterministic=False))
