"The site: `python docs/make.py` builds it into _docs/. What is not Sphinx's own is in literate.py."
import sys
from importlib.metadata import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fastrl_replay.all

project, author, copyright = 'fastrl_replay', 'The fastrl_replay contributors', 'The fastrl_replay contributors, Apache 2.0'
release = version = fastrl_replay.__version__
package, surface = 'fastrl_replay', fastrl_replay.all.__all__
chained = {f'.{c.stage_name}': f'{c.__module__}.{c.__name__}' for c in vars(fastrl_replay.all).values() if hasattr(c, 'stage_name')}
urls = dict(u.split(', ') for u in metadata('fastrl_replay').get_all('Project-URL', []))
repository = urls.get('Repository', '')    # pyproject's [project.urls]; without it there are no links to Colab
root_doc, unlisted = 'index', ['bench']    # modules that neither the search nor the index lists
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.viewcode', 'sphinx.ext.mathjax', 'sphinx_copybutton', 'literate']
exclude_patterns = ['**/.ipynb_checkpoints']

# The groups of the sidebar follow the data: what a step is, where steps come from, where they are kept, how they come back.
groups = {
    'Start': 'howto faq how_fast versions',
    'Tutorials': ' '.join(f'tutorials/{t}' for t in ['life_of_one_step', 'your_own_loop', 'your_own_stage', 'from_one_to_eight', 'a_thousand_actors', 'a_million_frames', 'a_memory_on_disk', 'goals_in_hindsight', 'your_data', 'from_seed_to_here', 'coming_from']),
    'Steps': '0?_*', 'Environments': '1?_*', 'Transforms': '2?_*', 'Memory': '3?_*', 'Replay': '4?_*', 'Learning': '5?_*',
    'Practice': '[67]?_*', 'Benchmarks': '8?_* 9[0-8]_*', 'Reference': '99_all combinations survives glossary contributing changelog'}

titles = {   # in the sidebar, where a page's own title says less
    '00_core': 'Steps, dtypes, errors', '00_states': 'Saved states, checked', '01_pipe': 'Pipe, the base of all stages',
    '02_testing': 'Scripted environments, contract', '03_episodes': 'Episodes and the gate', '04_batches': 'Sequences, a batch type',
    '04_files': 'Whole files, locks', '04_locks': 'Locks', '07_nested': 'Nested dicts and tuples', '09_envstate': 'Environment snapshots', '09_infos': 'Columns from info',
    '10_envs': 'GymStepper', '16_catch': 'Catch (pixels)', '17_atari': 'Atari', '18_bitflip': 'Bit flipping (goals)',
    '20_nstep': 'NStep, NSkip', '21_sequence': 'SequenceChunker', '22_journal': 'Journal, Gather',
    '30_arrays': 'Places', '30_directory': 'A place in files', '32_rows': 'Stores: Rows', '33_codecs': 'Codecs for frames',
    '33_frame_log': 'Frame log', '33_frame_segments': 'Frame segments in files', '33_frames': 'Store: Frames', '33_on_device': 'Stores on a GPU',
    '34_timeline': 'Timeline', '35_sumtree': 'SumTree', '36_ranktree': 'RankTree', '37_samplers': 'Samplers',
    '40_views': 'Views', '41_replay': 'Replay', '42_experience': 'ExperienceReplay',
    '43_prioritized': 'PrioritizedReplay', '44_sequence_view': 'View of sequences', '45_sequences': 'SequenceReplay', '46_hindsight': 'HindsightReplay',
    '50_losses': 'TD targets and losses', '51_policies': 'Policies and networks', '52_continuous': 'Continuous actions', '52_learners': 'Learner, the base class',
    '53_registry': 'Registry of learners', '54_tabular': 'QLearner (table)', '55_dqn': 'DQNLearner', '56_r2d2': 'R2D2Learner', '57_sac': 'SACLearner', '58_td3': 'TD3Learner',
    '59_all_learners': 'All learners', '60_named_envs': 'Environments by name', '60_offline': 'Recorded rows (offline)', '60_recipes': 'Recipes (settings.ini)', '61_runs': 'Runs and checkpoints',
    '61_survey': 'Survey of a memory on disk', '62_cli': 'Command line, results', '63_main': 'python -m fastrl_replay', '70_interop': 'DataLoader, torchdata, TensorDict',
    '71_parallel': 'Parallel', '72_prefetch': 'Prefetch', '89_peers': 'Benchmark adapters', '89_reports': 'Reports of benchmarks', '89_timing': 'Rows and timing', '90_bench': 'How benchmarks are run', 'how_fast': 'How fast: results', '91_traintime': 'Training time',
    '92_buffers': 'Six simple buffers', '93_bench_frames': 'Memories of pixels', '94_bench_disk': 'Memories on disk', '95_bench_on_device': 'Memories on a GPU',
    '99_all': 'All public names', 'tutorials/from_seed_to_here': 'History: from seed to here'}

nb_execution_mode = 'off'                 # the outputs were saved when the notebooks were tested
nb_render_markdown_format = 'gfm'         # in outputs: tables
highlight_language = 'text'               # of fences that name none; cells name theirs
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
autodoc_typehints, autodoc_preserve_defaults, autodoc_inherit_docstrings, autodoc_member_order = 'none', True, False, 'bysource'
python_maximum_signature_line_length = 80
add_module_names = False
mathjax_path = 'tex-svg.js'
mathjax3_config = {'options': {'enableMenu': False}}
pygments_style, pygments_dark_style = 'friendly', 'monokai'
html_theme, html_copy_source = 'furo', False
html_title = f'fastrl_replay {release}'
if repository: html_theme_options = dict(source_repository=repository, source_branch='main', source_directory='nbs/')
html_static_path = ['static']
html_css_files, html_js_files = ['site.css'], ['diagrams.js']
