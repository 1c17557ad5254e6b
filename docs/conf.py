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
root_doc = 'index'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.viewcode', 'sphinx.ext.mathjax', 'sphinx_copybutton', 'literate']
exclude_patterns = ['**/.ipynb_checkpoints']

# The groups of the sidebar follow the data: what a step is, where steps come from, where they are kept, how they come back.
groups = {
    'Tutorials': ' '.join(f'tutorials/{t}' for t in ['life_of_one_step', 'your_own_loop', 'your_own_stage', 'from_one_to_eight', 'a_million_frames', 'a_memory_on_disk', 'from_seed_to_here', 'coming_from']),
    'Steps': '0?_*', 'Environments': '1?_*', 'Transforms': '2?_*', 'Memory': '3?_*', 'Replay': '4?_*', 'Learning': '5?_*',
    'Practice': '[67]?_*', 'Benchmarks': '8?_* 9[0-8]_*', 'Reference': '99_all survives glossary contributing changelog'}

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
html_title = 'fastrl_replay'
html_static_path = ['static']
html_css_files, html_js_files = ['site.css'], ['diagrams.js']
