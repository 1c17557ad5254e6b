"The site: `python docs/make.py` builds it into _docs/. What is not Sphinx's own is in literate.py."

import sys
from importlib.metadata import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fastrl_replay

project, author, copyright = (
    'fastrl_replay',
    'The fastrl_replay contributors',
    'The fastrl_replay contributors, Apache 2.0',
)
release = version = fastrl_replay.__version__
urls = dict(u.split(', ') for u in metadata('fastrl_replay').get_all('Project-URL', []))
repository = urls.get(
    'Repository', ''
)  # pyproject's [project.urls]; without it there are no links to Colab
root_doc = 'index'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx_copybutton', 'literate']
exclude_patterns = ['**/.ipynb_checkpoints']


# The parts of the sidebar. All other notebooks are on the page of source notebooks.
def within(folder, names):
    return ' '.join(f'{folder}/{name}' for name in names.split())


groups = {
    'Start': 'install first_training',
    'Guides': 'tutorials/your_own_loop own_environment memories train command_line '
    + within(
        'tutorials',
        'saving_and_loading on_disk replay_from_pixels recurrent_agents goals_in_hindsight '
        'your_data several_agents simulators simulator_training scaling_out sizing '
        'your_own_sampler your_own_stage '
        'callbacks coming_from',
    )
    + ' sb3 how_fast howto faq',
    'Concepts': 'ideas tutorials/life_of_one_step '
    + within('replay', 'experience prioritized sequences hindsight')
    + ' stages/nstep papers',
    'Reference': 'all '
    + within(
        'reference',
        'experience_replay prioritized_replay sequence_replay hindsight_replay mixed_replay '
        'lane_replay stores '
        'timeline_class sampler_classes trees batch_classes pipes environments own_loop n_step '
        'sequence_chunker logging normalization recorded_data dqn_learners sac_td3_learners '
        'loss_functions network_parts exploration workers services learner_ranks other_loaders '
        'scripted error_types',
    ),
    'Design notes': within('memory', 'timeline frames sumtree directory')
    + ' stages/waiting parallel/stage steps/states combinations',
    'More': 'glossary changelog contributing sources',
}

sidebar = ' '.join(['index', *groups.values()]).split()

words = {  # what people search for, where the page says it in other words
    'index': 'BibTeX; cite; citation',
    'install': 'pip; installation; setup; requirements; extras; CUDA; CPU wheel; versions',
    'tutorials/your_own_loop': 'own loop; training loop; custom loss; CleanRL; final_observation',
    'own_environment': 'custom environment; custom env; gym environment',
    'memories': 'buffer; replay buffer; buffer_size; capacity; ring buffer',
    'train': 'recipe; hyperparameters; Rainbow; DDPG; IQL; CQL',
    'command_line': 'killed run; resume; tensorboard; live view; dashboard',
    'tutorials/saving_and_loading': 'checkpoint; resume; save; load; save buffer; state_dict; '
    'load model; save model; checkpoint interval',
    'tutorials/on_disk': 'disk; memmap; crash; kill -9; SIGKILL; larger than RAM; out of memory',
    'tutorials/replay_from_pixels': 'frame stack; FrameStackObservation; images; Atari; '
    'Atari memory; ALE; Pong; Breakout; optimize_memory_usage',
    'tutorials/recurrent_agents': 'RNN; LSTM; GRU; hidden state; recurrent states; '
    'recurrent agent; recurrent network; R2D2; DRQN; stored state',
    'tutorials/goals_in_hindsight': 'HER; HerReplayBuffer; goal-conditioned; GoalEnv; '
    'HerReplayBuffer speed',
    'tutorials/your_data': 'offline RL; dataset; demonstrations; Minari; D4RL; IQL; CQL; '
    'dataset of another environment; behavior cloning',
    'tutorials/several_agents': 'multi-agent; MARL; PettingZoo; QMIX; MADDPG',
    'tutorials/simulators': 'Isaac Lab; IsaacLab; Isaac Gym; ManiSkill; MuJoCo Playground; '
    'Brax; GPU simulator; batched environment',
    'tutorials/simulator_training': 'FastTD3; TD3; off-policy; GPU training; learner loop',
    'tutorials/scaling_out': 'Ray; RLlib; cluster; several machines; lost machine; node failure; '
    'several GPUs; multi-GPU; NCCL; distributed; num_workers; Ape-X; Reverb; DDP; torchrun',
    'tutorials/sizing': 'how many actors; simulation; throughput',
    'tutorials/your_own_sampler': 'custom sampler; own sampler; sampling strategy; Selector',
    'tutorials/callbacks': 'callback; early stopping; best model; record video; render; '
    'video of the best model; Weights & Biases',
    'tutorials/coming_from': 'batch_size; learning_starts; train_freq; gradient_steps; '
    'ReplayBufferSamples; TorchRL; TensorDictReplayBuffer; cpprb; Tianshou; Reverb; flashbax',
    'sb3': 'SB3; Stable-Baselines3; replay_buffer_class',
    'how_fast': 'benchmark; performance; speed',
    'howto': 'beta schedule; late TD errors; rows as arrays',
    'faq': 'error; slow; troubleshooting; not learning; priorities not changing; memory grows; '
    'hangs; workers hang; runs differ',
    'replay/prioritized': 'PER; prioritized experience replay; importance sampling; '
    'importance sampling weights; beta schedule; beta annealing',
    'replay/sequences': 'burn_in; burn-in',
    'replay/hindsight': 'HER; hindsight experience replay',
    'stages/nstep': 'multi-step; n-step; truncation; time limit',
    'all': 'API; api reference; classes; functions',
    'reference/prioritized_replay': 'update_priorities; PrioritizedReplayBuffer; '
    'PrioritizedSampler; importance sampling weights',
    'reference/experience_replay': 'add_step; sample; ReplayBuffer; visualize; plot; inspect; '
    'visualize memory; html page',
    'reference/sequence_replay': 'SliceSampler; EpisodeReplayBuffer',
    'reference/lane_replay': 'FastTD3; PQL; MuJoCo Playground; Brax; batched environments',
    'reference/stores': 'cuda; GPU; LazyMemmapStorage; LazyTensorStorage',
    'reference/exploration': 'epsilon greedy; epsilon schedule; entropy coefficient',
    'memory/directory': 'disk format; file format',
}

nb_execution_mode = 'off'  # the outputs were saved when the notebooks were tested
nb_render_markdown_format = 'gfm'  # in outputs: tables
highlight_language = 'text'  # of fences that name none; cells name theirs
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
autodoc_typehints, autodoc_preserve_defaults, autodoc_inherit_docstrings, autodoc_member_order = (
    'none',
    False,  # Sphinx knows no defaults of parameters that a constructor takes over from another
    False,
    'bysource',
)
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = 'hide'
smartquotes_action = 'D'  # dashes alone: quotes in the texts of the API are code
add_module_names = False
html_math_renderer = 'svg'
pygments_style, pygments_dark_style = 'default', 'monokai'
html_theme, html_copy_source = 'furo', False
html_title = f'fastrl_replay {release}'
if repository:
    html_theme_options = dict(
        source_repository=repository, source_branch='main', source_directory='nbs/'
    )
html_static_path = ['static']
html_css_files, html_js_files = ['site.css'], ['pages.js']
html_favicon = 'static/favicon.svg'
copybutton_image_svg = '<span>Copy</span>'
suppress_warnings = ['toc.not_included']  # source notebooks
html_search_scorer = str(Path(__file__).parent / 'static/scorer.js')
