"""best.ckpt: what counts as better, the same file after a killed run, policies without a recipe."""

import json, shutil, sys

import pytest, torch

from fastrl_replay.all import evaluate, load_policy
from fastrl_replay.app.run_files import read_metrics
from fastrl_replay.app.runs import reopen, resume
from fastrl_replay.app.saved_policies import load_checkpoint
from fastrl_replay.cli import main
from fastrl_replay.learning.settings import SettingsError
from fastrl_replay.testing import same
from test_recipes import Killed, killed, says, stop, tiny  # noqa: F401

OFTEN = dict(
    steps=600, eval_every=50, save_every=120
)  # ten evaluations and more, of which some are after the checkpoint before them


def best_of(out):
    return {k: v for k, v in load_checkpoint(out / 'best.ckpt').items() if k != 'settings'}


@pytest.fixture(scope='module')
def often(tmp_path_factory):
    out = tmp_path_factory.mktemp('often') / 'r'
    tiny(out, **OFTEN).train()
    return out


def test_best_is_the_first_of_the_largest_and_loads_as_plain_tensors(often):
    evals = [m for m in read_metrics(often) if 'eval_return' in m]
    assert len(evals) > 10 and len({m['eval_return'] for m in evals}) > 2
    first = max(evals, key=lambda m: m['eval_return'])  # max gives the first
    best = load_checkpoint(often / 'best.ckpt')
    s = json.loads((often / 'summary.json').read_text())
    for key in 'env_steps', 'eval_return', 'eval_episodes':
        assert best[key] == first[key]
    assert (s['best_at_step'], s['best_return']) == (best['env_steps'], best['eval_return'])
    assert all(isinstance(x, torch.Tensor) for x in best['model'].values())


@pytest.mark.slow
@pytest.mark.parametrize('nth,after', [(1, False), (2, True)])
def test_a_run_killed_at_its_best_model_ends_with_the_same_one(
    nth, after, often, tmp_path, monkeypatch
):
    killed(tmp_path / 'r', monkeypatch, 'best.ckpt', nth, after, **OFTEN)
    resume(tmp_path / 'r').train()
    assert same(best_of(often), best_of(tmp_path / 'r'))


def test_eval_best_plays_with_the_best_model(often, capsys):
    agent, step = reopen(often, best=True)
    best = load_checkpoint(often / 'best.ckpt')
    assert step == best['env_steps'] and same(dict(agent.model.state_dict()), best['model'])
    assert main(['eval', str(often), '--best', '--episodes', str(best['eval_episodes'])]) == 0
    said = capsys.readouterr().out
    assert f'best model, from {step:,} steps' in said and f'{best["eval_return"]:.5g}' in said
    returns = evaluate(load_policy(often), 'CartPole-v1', best['eval_episodes'], 1_000_003)
    assert returns.mean() == pytest.approx(best['eval_return'])


def test_load_policy_is_the_last_checkpoint_if_asked(often):
    states = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    expected = reopen(often)[0].greedy()(states)
    assert (load_policy(often, best=False)(states) == expected).all()
    assert (load_policy(often / 'checkpoint.ckpt')(states) == expected).all()


def test_eval_best_without_one_says_what_to_do(often, tmp_path, capsys):
    out = shutil.copytree(often, tmp_path / 'r')
    (out / 'best.ckpt').unlink()
    assert 'its first evaluation writes best.ckpt' in says(capsys, 'eval', out, '--best')
    (out / 'best.ckpt').write_bytes(b'PK\3\4 half')
    assert "best.ckpt cannot be read" in says(capsys, 'eval', out, '--best')
    with pytest.raises(SettingsError, match="best.ckpt cannot be read"):
        load_policy(out)


def test_load_policy_imports_no_module_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / 'bestmine.py').write_text(
        "import gymnasium as gym\n"
        "gym.register('BestMine-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv')"
    )
    monkeypatch.chdir(tmp_path)
    tiny(
        tmp_path / 'r', env='bestmine:BestMine-v0', wrappers='TimeLimit(max_episode_steps=50)'
    ).train()
    del sys.modules['bestmine']
    assert (
        len(load_policy(tmp_path / 'r')(torch.zeros(3, 4))) == 3 and 'bestmine' not in sys.modules
    )
