"The site: `python docs/make.py` builds it into _docs/. What is not Sphinx's own is in literate.py."

import sys
from importlib.metadata import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fastrl_replay.all

project, author, copyright = (
    'fastrl_replay',
    'The fastrl_replay contributors',
    'The fastrl_replay contributors, Apache 2.0',
)
release = version = fastrl_replay.__version__
surface = fastrl_replay.all.__all__
chained = {
    f'.{c.stage_name}': f'{c.__module__}.{c.__name__}'
    for c in vars(fastrl_replay.all).values()
    if hasattr(c, 'stage_name')
}
urls = dict(u.split(', ') for u in metadata('fastrl_replay').get_all('Project-URL', []))
repository = urls.get(
    'Repository', ''
)  # pyproject's [project.urls]; without it there are no links to Colab
root_doc = 'index'
extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.viewcode',
    'sphinx.ext.mathjax',
    'sphinx_copybutton',
    'literate',
]
exclude_patterns = ['**/.ipynb_checkpoints']


# Parts of the sidebar, by what a reader wants; internals are the source lessons, in import order.
def tutorials(names):
    return ' '.join(f'tutorials/{n}' for n in names.split())


groups = {
    'Use it': 'install first_training '
    + tutorials('your_own_loop')
    + ' own_environment memories stages train command_line app/runs howto faq '
    'envs/atari learning/r2d2 '
    + tutorials(
        'replay_from_pixels goals_in_hindsight several_agents your_data a_memory_on_disk '
        'from_one_to_eight from_machine_to_cluster a_thousand_actors your_own_stage'
    )
    + ' memory/samplers '
    + tutorials('callbacks coming_from')
    + ' sb3 how_fast survives',
    'Understand it': 'ideas '
    + tutorials('life_of_one_step')
    + ' replay/experience replay/prioritized replay/sequences replay/hindsight papers '
    + tutorials('from_seed_to_here'),
    'Reference': 'all reference/classes combinations glossary versions changelog',
    'Internals': 'modules internals/steps_and_pipes internals/environments internals/transforms '
    'internals/memory internals/replay internals/learning internals/data internals/many_processes '
    'internals/pages_and_figures internals/recipes_and_runs internals/command_line contributing',
}
internals = {
    'Steps and pipes': 'steps/* pipe generic testing',
    'Environments': 'envs/*',
    'Transforms': 'stages/*',
    'Memory': 'memory/*',
    'Replay': 'replay/views replay/own_steps replay/replay replay/sequence_view replay/mixture',
    'Learning': 'learning/*',
    'Data': 'data/*',
    'Many processes': 'parallel/*',
    'Pages and figures': 'look/*',
    'Recipes and runs': 'app/*',
    'Command line': 'cli main',
}
classes = [c for c in map(vars(fastrl_replay.all).get, surface) if isinstance(c, type)]

words = {  # what people search for, where the page says it in other words
    'install': 'pip; installation; setup; requirements; extras; CUDA; CPU wheel',
    'memories': 'buffer; replay buffer; buffer_size; capacity; ring buffer',
    'reference/classes': 'API; api reference',
    'memory/samplers': 'custom sampler; own sampler; sampling strategy',
    'tutorials/your_own_loop': 'custom training loop; training loop; custom loss',
    'own_environment': 'custom environment; custom env; gym environment',
    'look/show': 'visualize; plot; inspect',
    'look/page': 'visualize memory; html page',
    'tutorials/coming_from': 'batch_size; learning_starts; train_freq; gradient_steps',
    'replay/prioritized': 'PER; prioritized experience replay; importance sampling; '
    'importance weights; beta schedule; beta annealing',
    'replay/hindsight': 'HER; hindsight experience replay; HerReplayBuffer; HerReplayBuffer speed',
    'replay/sequences': 'RNN; LSTM; recurrent; burn_in',
    'learning/r2d2': 'R2D2; recurrent agent; recurrent network',
    'command_line': 'kill -9; SIGKILL; killed run; resume',
    'howto': 'HerReplayBuffer; hidden state; recurrent states; beta schedule; '
    'late TD errors; rows as arrays; Atari memory; kill -9',
    'tutorials/from_machine_to_cluster': 'Ray; cluster; several machines; '
    'lost machine; node failure',
    'parallel/stage': 'distributed; multiprocessing; num_workers; Ape-X; APEX',
    'parallel/service': 'Reverb; server',
    'app/commands': 'tensorboard; logging',
    'app/runs': 'checkpoint; resume; save; load; save_every; checkpoint interval',
    'app/saved_policies': 'load model; save model',
    'tutorials/your_data': 'offline RL; dataset; demonstrations; Minari; D4RL; '
    'dataset of another environment',
    'memory/on_device': 'cuda; GPU',
    'memory/frames': 'frame stack; images; Atari memory',
    'tutorials/several_agents': 'multi-agent; MARL; PettingZoo',
    'app/watching': 'live view; dashboard; monitor',
    'envs/atari': 'Atari; Atari environment; ALE; Pong; Breakout',
    'learning/video': 'record video; render; video of the best model',
    'faq': 'error; slow; troubleshooting; not learning; priorities not changing; memory grows; '
    'hangs; workers hang; runs differ',
    'sb3': 'SB3; replay_buffer_class',
    'stages/nstep': 'multi-step; n-step',
    'tutorials/callbacks': 'callback; early stopping; best model',
    'tutorials/a_memory_on_disk': 'disk; persist; memmap',
    'how_fast': 'benchmark; performance',
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
viewcode_follow_imported_members = False  # a page's names are all its module's
smartquotes_action = 'D'  # dashes alone: quotes in the texts of the API are code
add_module_names = False
mathjax_path = 'tex-svg.js'
mathjax3_config = {'options': {'enableMenu': False}}
pygments_style, pygments_dark_style = 'default', 'monokai'
html_theme, html_copy_source = 'furo', False
html_title = f'fastrl_replay {release}'
if repository:
    html_theme_options = dict(
        source_repository=repository, source_branch='main', source_directory='nbs/'
    )
html_static_path = ['static']
html_css_files, html_js_files = ['site.css'], ['diagrams.js', 'pictures.js']
html_show_search_summary = False  # browsers refuse to fetch other pages of file://
html_search_scorer = str(Path(__file__).parent / 'static/scorer.js')
