"""Build the site from the notebooks: `python docs/make.py [FOLDER]`, _docs by default.

It is static and complete: open FOLDER/index.html, without a server or internet. Only the build
fetches something: MathJax from the npm registry, checked by its hash and kept in ~/.cache."""

import hashlib, io, os, re, shutil, sys, tarfile, tempfile, urllib.request
from base64 import b64decode
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MATHJAX = 'https://registry.npmjs.org/mathjax/-/mathjax-3.2.2.tgz'  # sets equations
SCRIPTS = (
    'es5/loader.js es5/core.js es5/adaptors/liteDOM.js es5/input/tex.js es5/output/svg.js '
    'es5/output/svg/fonts/tex.js'
)
SHA512 = 'Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw=='


def mathjax():
    "Return the scripts of MathJax as one file, from the cache or the registry."
    cache = Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache'))
    kept = cache / 'fastrl_replay_docs' / MATHJAX.split('/')[-1] / 'mathjax.js'
    if not kept.exists():
        archive = urllib.request.urlopen(MATHJAX, timeout=60).read()
        if hashlib.sha512(archive).digest() != b64decode(SHA512):
            sys.exit(f'{MATHJAX} is not what it was when its hash was noted in {__file__}')
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            files = [tar.extractfile(f'package/{name}').read() for name in SCRIPTS.split()]
        part = kept.with_suffix(f'.{os.getpid()}')
        part.write_bytes(b'\n'.join(files))
        part.replace(kept)
    return kept


def source(folder):
    "A copy of the notebooks in `folder`, with the page of those that the sidebar has not."
    import conf
    from reference import write_sources

    shutil.copytree(
        ROOT / 'nbs', folder / 'nbs', ignore=shutil.ignore_patterns('.ipynb_checkpoints')
    )
    linked = {
        name
        for page in ROOT.glob('nbs/*.*')
        for name in re.findall(r'\]\(\.\./([\w./-]+)', page.read_text(encoding='utf-8'))
    }
    for name in {'CHANGELOG.md', 'CONTRIBUTING.md'} | {n for n in linked if (ROOT / n).is_file()}:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    write_sources(folder / 'nbs', conf.sidebar)
    return folder / 'nbs'


def build(out):
    "The site in `out`, or an exit that names its faults: any warning is one."
    from sphinx.cmd.build import build_main

    out = Path(out)
    if out.is_dir() and any(out.iterdir()) and not (out / 'objects.inv').exists():
        sys.exit(f'{out} is not empty and not a site')
    with tempfile.TemporaryDirectory() as tmp:
        if build_main(
            [
                '-q',
                '-n',
                '-W',
                '--keep-going',
                '-c',
                str(DOCS),
                '-d',
                f'{tmp}/doctrees',
                str(source(Path(tmp))),
                f'{tmp}/site',
            ]
        ):
            sys.exit('the site has faults: see the warnings above')
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(f'{tmp}/site', out)


if __name__ == '__main__':
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / '_docs').resolve()
    build(out)
    print(f'open {out}/index.html')
