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
    'Tutorials': ' '.join(f'tutorials/{t}' for t in ['life_of_one_step', 'your_own_loop', 'your_own_stage', 'callbacks', 'sweeps', 'several_agents', 'from_one_to_eight', 'a_thousand_actors', 'a_million_frames', 'a_memory_on_disk', 'goals_in_hindsight', 'your_data', 'from_seed_to_here', 'coming_from']),
    'Steps': 'steps/* pipe testing', 'Figures': 'look/*', 'Environments': 'envs/*', 'Transforms': 'stages/*', 'Memory': 'memory/*', 'Replay': 'replay/*',
    'Learning': 'learning/*', 'Data': 'data/* sb3', 'Many processes': 'parallel/*', 'Recipes and runs': 'app/*', 'Benchmarks': 'bench/*', 'Command line': 'cli main',
    'Reference': 'all combinations survives glossary contributing changelog'}

titles = {   # in the sidebar, where a page's own title says less
    'steps/core': 'Steps', 'steps/errors': 'Errors', 'steps/row_dtypes': 'Row dtypes', 'steps/compiled': 'Compiled helpers', 'steps/machine': 'The machine', 'stages/waiting': 'Rows that wait', 'steps/states': 'Saved states, checked', 'pipe': 'Pipe, the base of all stages',
    'testing': 'Scripted environments, contract', 'envs/episodes': 'Episodes and the gate', 'envs/numbering': 'Environments by number', 'envs/nans': 'NaN, found fast', 'steps/batches': 'Sequences, a batch type', 'steps/recycled': 'Memory of batches', 'steps/other_names': 'Names of other libraries',
    'steps/files': 'Whole files, locks', 'steps/locks': 'Locks', 'steps/nested': 'Nested dicts and tuples', 'envs/envstate': 'Environment snapshots', 'envs/infos': 'Columns from info',
    'envs/stepper': 'GymStepper', 'envs/slots': 'Environment slots', 'envs/vector_slots': 'Vector environments', 'envs/acting': 'Asking a policy', 'envs/group': 'Environment groups', 'envs/checks': 'What environments return', 'envs/sources': 'Sources of environments', 'envs/own_steps': 'Steps of your own loop', 'envs/agents': 'Agents of an environment', 'envs/agent_slots': 'Rows of agents', 'envs/agent_groups': 'Groups of agents', 'envs/catch': 'Catch (pixels)', 'envs/atari': 'Atari', 'envs/bitflip': 'Bit flipping (goals)',
    'stages/nstep': 'NStep, NSkip', 'stages/chunker': 'SequenceChunker', 'stages/journal': 'Journal, Gather', 'stages/normalisation': 'States and rewards on one scale',
    'memory/places': 'Places', 'memory/mapped': 'Files as arrays', 'memory/directory': 'A place in files', 'memory/rows': 'Stores: Rows', 'memory/codecs': 'Codecs for frames',
    'memory/frame_log': 'Frame log', 'memory/frame_segments': 'Frame segments in files', 'memory/frames': 'Store: Frames', 'memory/on_device': 'A place on a GPU', 'memory/device_frames': 'Frames on a GPU',
    'memory/timeline': 'Timeline', 'memory/sumtree': 'SumTree', 'memory/ranktree': 'RankTree', 'memory/draws': 'Random numbers', 'memory/samplers': 'Samplers', 'memory/priorities': 'Samplers by priority',
    'replay/views': 'Views', 'replay/moments': 'Moments of several agents', 'replay/replay': 'Replay', 'replay/experience': 'ExperienceReplay',
    'replay/prioritized': 'PrioritizedReplay', 'replay/sequence_view': 'View of sequences', 'replay/sequences': 'SequenceReplay', 'replay/hindsight': 'HindsightReplay',
    'look/inside': 'Facts of a memory', 'look/html': 'Pages in one file', 'look/memory_page': 'A memory on a page', 'look/sampled': 'A sample of a memory', 'look/pixels': 'Observations as pictures', 'look/remarks': 'Remarks on a memory', 'look/memory_figure': 'A memory in one figure', 'look/figures': 'Figures of a training', 'look/curves': 'Curves as SVG', 'look/run_page': 'The page of a run', 'look/server': 'A server of pages',
    'learning/losses': 'TD targets and losses', 'learning/networks': 'Networks', 'learning/policies': 'Policies', 'learning/continuous': 'Continuous actions', 'learning/base': 'Learner, the base class', 'learning/checkpoints': 'Checkpoints of learners', 'learning/video': 'Videos of episodes',
    'learning/registry': 'Registry of learners', 'learning/tabular': 'QLearner (table)', 'learning/dqn': 'DQNLearner', 'learning/r2d2': 'R2D2Learner', 'learning/sac': 'SACLearner', 'learning/td3': 'TD3Learner',
    'learning/learners': 'All learners', 'app/named_envs': 'Environments by name', 'app/offline': 'Recorded rows (offline)', 'app/recipes': 'Recipes (settings.ini)', 'app/saved_policies': 'Policies from files', 'app/runs': 'Runs and checkpoints',
    'app/run_files': 'Files of a run', 'app/tracking': 'Tracking a run', 'app/run_reports': 'Reports of a run', 'app/watching': 'Watching runs', 'app/survey': 'Survey of a memory on disk', 'cli': 'Command line, results', 'main': 'python -m fastrl_replay', 'data/interop': 'DataLoader, torchdata, TensorDict',
    'parallel/shards': 'Shards', 'parallel/saved_workers': 'Workers in a checkpoint', 'parallel/stage': 'Parallel', 'parallel/service': 'A memory as a service', 'parallel/prefetch': 'Prefetch', 'parallel/ranks': 'Several learners', 'bench/adapters': 'Benchmark adapters', 'bench/peer_memories': 'Memories that are compared', 'bench/peers': 'Libraries in their processes', 'bench/reports': 'Reports of benchmarks', 'bench/timing': 'Rows and timing', 'bench/contests': 'What is measured', 'bench/bench': 'How benchmarks are run', 'how_fast': 'How fast: results', 'bench/traintime': 'Training time',
    'bench/buffers': 'Six simple buffers', 'bench/bench_frames': 'Memories of pixels', 'bench/bench_disk': 'Memories on disk', 'bench/bench_on_device': 'Memories on a GPU',
    'all': 'All public names', 'tutorials/callbacks': 'Callbacks', 'tutorials/sweeps': 'Sweeps', 'tutorials/from_seed_to_here': 'History: from seed to here'}

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
