"""Draw from shards in processes and in actors of Ray, and step slow environments there."""
from harness import OURS, Worker, comparison, markdown_table, race


def run(options):
    engines, counts = ('process', 'ray'), (1, 2, 4, 8)
    size, rounds, seconds = 100_000, 7, 3.
    if options.quick:
        engines, counts, size, rounds, seconds = ('process',), (1, 2), 2_000, 2, .3
    entries = {'here': (OURS, 'ours_parallel', dict(size=size, shards=0))}
    for kind in engines:
        entries[f'2 shards, {kind}'] = OURS, 'ours_parallel', dict(size=size, shards=2, kind=kind)
    found = race({'draw 256 rows by priority, and update': entries},
                 options.libraries, rounds, seconds/30)
    found.update(actors={}, parts={})
    for kind in engines:
        worker = Worker(OURS)
        found['actors'][kind], parts = worker.call(
            'measure', 'ours_parallel', kind=kind, counts=counts, seconds=seconds)
        found['parts'].update(parts)
        worker.close()
    return found


def report(results):
    lines = [[kind, n, rate]
             for kind, rates in results['actors'].items() for n, rate in rates.items()]
    actors = markdown_table(['engine', 'actors that wait 5 ms', 'steps a second'], lines)
    return comparison(results['contests']) + '\n\n' + actors
