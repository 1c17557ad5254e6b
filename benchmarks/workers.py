"""Draw from shards in processes and in actors of Ray, step slow environments there, send weights to them."""
from harness import OURS, Worker, WorkerError, comparison, markdown_table, time_in_turns

MODULE = 'ours_parallel'


def run(options):
    engines = ('process',) if options.quick else ('process', 'ray')
    size, seconds, counts = (2_000, .3, (1, 2)) if options.quick else (100_000, 3., (1, 2, 4, 8))
    found = dict(contests={}, rows_a_second={}, actors={}, weights={}, faults={})
    workers = {'here': Worker(OURS)} | {f'{kind}, chunk={c}': Worker(OURS) for kind in engines for c in (4, 16, 32)}
    for name, worker in workers.items():
        kind, _, chunk = name.partition(', chunk=')
        settings = dict(kind=kind, shards=2, chunk=int(chunk)) if chunk else dict(shards=0)
        worker.call('prepare', MODULE, size=size, **settings)
    if 'torchrl' in options.libraries:
        worker = Worker('torchrl', options.libraries['torchrl'][0])
        try:
            worker.call('prepare', 'rows', job='ray', size=size, n=256)
            workers['torchrl, Ray, draw alone'] = worker
        except WorkerError as error:
            found['faults']['torchrl'] = str(error)
            worker.close()
    found['contests']['draw 256 rows, and update'] = time_in_turns(workers, 2 if options.quick else 7, seconds/30)
    for worker in workers.values():
        worker.close()
    worker = Worker(OURS)
    found['parts'] = worker.call('parts', MODULE)
    for kind in engines:
        found['parts'][f'message_{kind}'] = worker.call('message_of', MODULE, kind=kind)
        found['rows_a_second'][kind] = worker.call('rows_a_second', MODULE, kind=kind, seconds=seconds)
        found['actors'][kind] = {n: worker.call('actors', MODULE, n=n, kind=kind, seconds=seconds) for n in counts}
        found['weights'][kind] = {n: worker.call('weights', MODULE, workers=n, kind=kind, megabytes=1 if options.quick else 100)
                                  for n in (counts if options.quick else (1, 4, 8, 32))}
    worker.close()
    return found


def report(results):
    tables = [comparison(results['contests'])]
    for kind, rate in results['rows_a_second'].items():
        tables.append(f'{kind}: two shards take {rate:,.0f} rows a second')
    lines = [[kind, n, rate] for kind, rates in results['actors'].items() for n, rate in rates.items()]
    tables.append(markdown_table(['engine', 'actors that wait 5 ms', 'steps a second'], lines))
    lines = [[kind, n, x['same'], x['new']] for kind, found in results['weights'].items() for n, x in found.items()]
    tables.append(markdown_table(['engine', 'workers', 'ms a round, the same weights', 'new weights'], lines))
    return '\n\n'.join(tables)
