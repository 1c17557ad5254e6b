"""Build the site from the notebooks: `python docs/make.py [FOLDER]`, _docs by default.

It is static and complete: open FOLDER/index.html, without a server or internet. Only the build
fetches something: two scripts from the npm registry, checked by their hash and kept in ~/.cache."""

import hashlib, io, os, re, shutil, sys, tarfile, tempfile, urllib.request
from base64 import b64decode
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SCRIPTS = {  # files of an npm package each: equations and diagrams
    'mathjax.js': (
        'mathjax/-/mathjax-3.2.2.tgz',
        'es5/loader.js es5/core.js es5/adaptors/liteDOM.js es5/input/tex.js es5/output/svg.js '
        'es5/output/svg/fonts/tex.js',
        'Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==',
    ),
    'mermaid.tiny.js': (
        '@mermaid-js/tiny/-/tiny-12.0.0.tgz',
        'dist/mermaid.tiny.js',
        'ZW9YXy+3tSLPscBT+NnQO0K0qYH7BGES5nExl6Snoygey7xd2N0cO7Nq30N5k/u7gIeYoCrldyVy+VTCMWrNDQ==',
    ),
}


def fetch(name):
    "The script `name` of SCRIPTS, from the cache or the registry."
    package, members, sha512 = SCRIPTS[name]
    kept = (
        Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache'))
        / 'fastrl_replay_docs'
        / package.split('/')[-1]
        / name
    )
    if not kept.exists():
        url = f'https://registry.npmjs.org/{package}'
        archive = urllib.request.urlopen(url, timeout=60).read()
        if hashlib.sha512(archive).digest() != b64decode(sha512):
            sys.exit(f'{url} is not what it was when its hash was noted in {__file__}')
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            script = b'\n'.join(tar.extractfile(f'package/{m}').read() for m in members.split())
        part = kept.with_suffix(f'.{os.getpid()}')
        part.write_bytes(script)
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
        shutil.copy(fetch('mermaid.tiny.js'), f'{tmp}/site/_static')
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(f'{tmp}/site', out)


if __name__ == '__main__':
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / '_docs').resolve()
    build(out)
    print(f'open {out}/index.html')
