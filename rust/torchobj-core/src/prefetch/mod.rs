//! Reads objects ahead of their use, for a process and its DataLoader workers, in the announced order.
//!
//! * **Actors.** One [`Prefetcher`] per process owns an [`Arena`] and reads all objects into it. Callers in the same
//!   process call [`take`](Prefetcher::take); workers send requests through the arena. A loader announces the objects
//!   of later batches with [`announce`](Prefetcher::announce).
//! * **Sources and objects.** A source is a manifest with its clients ([`Source`]), or a set of names that callers add
//!   one by one (`names`). An [`Object`] is the number of a source and the number of an object in it.
//! * **Modules.** `window` keeps the announced order and decides which object is read or evicted next; it does no I/O.
//!   `source` implements the engine's `Source`: it runs the reads that `window` selects; `coalesce` reads neighbouring
//!   ranges of one object with one request. `serve` answers the requests
//!   of workers. `demand` takes objects
//!   for callers and workers. `limits` adds up the permits of all clients. `shortage` writes the warnings about memory.
//! * **Memory.** A read allocates its segment when the response's length is known, and a reservation counts against the
//!   budget until then. Announced reads stay within the budget; demanded reads start although they exceed it. A segment
//!   is freed when its caller or worker drops it; the prefetcher continues then.
//!
//! An announcement is a hint: `take` returns every object, announced or not, and an announced one earlier.

mod coalesce;
mod demand;
mod job;
mod limits;
mod names;
mod serve;
mod shortage;
mod source;
mod stats;
mod window;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use tokio::sync::oneshot;

use self::demand::Demand;
pub use self::job::Object;
use self::job::TakeOutcome;
pub use self::names::CreateClient;
use self::names::Names;
pub use self::stats::Stats;
use self::stats::WaitTimer;
use self::window::{Delivery, Window};
use crate::arena::{Answers, Arena, Segment};
use crate::client::Client;
use crate::engine::Tasks;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::manifest::Manifest;
use crate::object_ref::ObjectRef;
use crate::policy::{ConcurrencyLimit, Metrics};
use crate::read::ReadResult;
use crate::runtime::runtime;

/// Assumed size of an object of unknown size, before one was read.
const UNKNOWN_BYTES: u64 = 128 << 10;

/// A manifest and the clients that read its objects.
#[derive(Clone, Debug)]
pub struct Source {
    /// The objects.
    pub manifest: Arc<Manifest>,
    /// One client for each base of the manifest.
    pub clients: Vec<Arc<Client>>,
    /// Whether an object must have the size and version of the manifest, which otherwise only estimate it.
    pub pinned: bool,
}

/// A source that was added.
#[derive(Debug)]
enum KnownSource {
    Listed(Source),
    Named(Names),
}

/// The result of a read: bytes in a segment of the arena.
#[derive(Debug)]
struct Body {
    result: ReadResult,
    segment: Arc<Segment>,
}

/// A caller that waits for an object.
#[derive(Debug)]
enum Waiter {
    /// A worker. `timer` measures the wait of its whole request.
    Answer { answers: Arc<Answers>, position: usize, timer: Arc<WaitTimer> },
    /// A caller in this process.
    Local(oneshot::Sender<Result<ReadResult>>),
}

impl Waiter {
    /// Returns whether the caller has stopped waiting.
    fn is_closed(&self) -> bool {
        match self {
            Self::Answer { answers, .. } => answers.is_cancelled(),
            Self::Local(sender) => sender.is_closed(),
        }
    }
}

/// Reads ahead for this process and its workers.
#[derive(Debug)]
pub struct Prefetcher {
    arena: Arc<Arena>,
    window: Mutex<Window<Body, Waiter>>,
    sources: Mutex<HashMap<u64, KnownSource>>,
    /// Iterators of workers, by the process id of the worker and its number of the iterator.
    worker_iterators: Mutex<HashMap<(u32, u32), u64>>,
    next: AtomicU64,
    /// Running reads.
    tasks: Tasks,
    /// Concurrency limits of the clients of all current sources, each once.
    limits: Mutex<Vec<Arc<ConcurrencyLimit>>>,
    /// Metrics of the clients of all sources ever added, each once. Clients live as long as the process.
    metrics: Mutex<Vec<Arc<Metrics>>>,
    /// Moving average of the sizes that were unknown before the read.
    mean_bytes: AtomicU64,
    stats: Arc<stats::AllCounters>,
    shortage: Mutex<shortage::Shortage>,
    /// When the release of memory was decided last, and the number of objects and blocks that were requested by then.
    release_checked: Mutex<Option<(Instant, u64)>>,
}

impl Prefetcher {
    /// Starts a prefetcher whose segments take `budget` bytes, and the task that serves workers as long as the process
    /// lives. The limit of concurrent reads is the sum of what the clients of its sources allow for read-ahead.
    ///
    /// # Errors
    /// The system refuses the arena or its eventfd.
    pub fn start(budget: u64) -> io::Result<Arc<Self>> {
        let prefetcher = Self::without_service(budget)?;
        let service = {
            let _context = runtime().enter();
            crate::arena::serve(prefetcher.arena.clone(), prefetcher.clone())?
        };
        runtime().spawn(async move {
            if let Err(error) = service.await {
                log::error!("requests of DataLoader workers are not answered any more: {error}");
            }
        });
        Ok(prefetcher)
    }

    /// A prefetcher that serves no workers.
    fn without_service(budget: u64) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            arena: Arena::create(budget)?,
            window: Mutex::default(),
            sources: Mutex::default(),
            worker_iterators: Mutex::default(),
            next: AtomicU64::new(1),
            tasks: Tasks::new(runtime().handle().clone()),
            limits: Mutex::default(),
            metrics: Mutex::default(),
            mean_bytes: AtomicU64::new(UNKNOWN_BYTES),
            stats: Arc::default(),
            shortage: Mutex::default(),
            release_checked: Mutex::default(),
        }))
    }

    /// The arena that holds the objects.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn window(&self) -> MutexGuard<'_, Window<Body, Waiter>> {
        self.window.lock().expect("no holder of this lock panics")
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<u64, KnownSource>> {
        self.sources.lock().expect("no holder of this lock panics")
    }

    fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a source. Returns its number.
    pub fn add_source(&self, source: Source) -> u64 {
        let _inside = fork::enter();
        let number = self.next_number();
        self.add_metrics(&source.clients);
        let mut sources = self.sources();
        sources.insert(number, KnownSource::Listed(source));
        self.update_limits(&sources);
        number
    }

    /// Adds a source whose objects are named one by one. Returns its number.
    pub fn add_names(&self, create_client: Arc<CreateClient>) -> u64 {
        let _inside = fork::enter();
        let number = self.next_number();
        self.sources().insert(number, KnownSource::Named(Names::new(create_client)));
        number
    }

    /// Numbers of the objects of `source` with these names. Announce them immediately: numbers that are neither
    /// announced nor demanded are removed after some time.
    pub fn objects<'a>(&self, source: u64, names: impl Iterator<Item = &'a ObjectRef>) -> Vec<Object> {
        self.sweep(source);
        let number = |name: &ObjectRef| {
            let _inside = fork::enter();
            Demand::Name { source, record: name.to_bytes() }.object(&mut self.sources())
        };
        names.map(number).collect()
    }

    /// Removes unused names once there are many.
    fn sweep(&self, source: u64) {
        let _inside = fork::enter();
        if let Some(KnownSource::Named(names)) = self.sources().get_mut(&source)
            && names.is_full()
        {
            names.sweep(&self.window().numbers_of(source));
        }
    }

    /// Removes a source. Its running reads complete.
    pub fn remove_source(&self, number: u64) {
        let _inside = fork::enter();
        let mut sources = self.sources();
        sources.remove(&number);
        self.update_limits(&sources);
    }

    /// Starts an iterator of a loader. All objects that are announced for it can be cancelled together.
    pub fn new_iterator(&self, loader: u64) -> u64 {
        let _inside = fork::enter();
        let number = self.next_number();
        self.window().begin(number, loader);
        number
    }

    /// Announces that these objects will be taken, in this order, after the objects announced for the iterator before.
    pub fn announce(self: &Arc<Self>, iterator: u64, objects: &[Object]) {
        {
            let _inside = fork::enter();
            let charges: Vec<u64> = objects.iter().map(|object| self.charge(&self.sources(), *object)).collect();
            let mut window = self.window();
            for (object, charge) in objects.iter().zip(charges) {
                window.announce(iterator, *object, charge);
            }
        }
        self.pump();
    }

    /// Bytes that are announced for an iterator and not taken.
    pub fn pending(&self, iterator: u64) -> u64 {
        let _inside = fork::enter();
        self.window().announced_bytes(iterator)
    }

    /// Number of objects that were announced for an iterator and taken.
    pub fn taken(&self, iterator: u64) -> u64 {
        let _inside = fork::enter();
        self.window().taken(iterator)
    }

    /// Drops the objects that are announced for an iterator and not taken.
    pub fn cancel(self: &Arc<Self>, iterator: u64) {
        let bodies = {
            let _inside = fork::enter();
            self.window().cancel(iterator)
        };
        drop(bodies);
        self.pump();
    }

    /// Bytes of the budget that an object takes.
    fn charge(&self, sources: &HashMap<u64, KnownSource>, object: Object) -> u64 {
        let mean = self.mean_bytes.load(Ordering::Relaxed);
        match sources.get(&object.source) {
            Some(KnownSource::Listed(source)) => charge(&source.manifest, object.index, Some(mean)),
            Some(KnownSource::Named(names)) => {
                let length = names.get(object.index).and_then(|name| name.length());
                Arena::charge(length.unwrap_or(mean))
            }
            None => Arena::charge(mean),
        }
    }

    /// Returns whether any object is announced or demanded, and not taken.
    pub fn has_announced(&self) -> bool {
        let _inside = fork::enter();
        self.window().len() > 0
    }

    /// Forgets the counters of a loader that no longer exists.
    pub fn remove_loader(&self, loader: u64) {
        self.stats.remove(loader);
    }

    /// Current counters.
    pub fn stats(&self) -> Stats {
        self.stats_of(None)
    }

    /// Current counters of a loader, or of all; and the state of the prefetcher.
    pub fn stats_of(&self, loader: Option<u64>) -> Stats {
        let _inside = fork::enter();
        let (announced, ahead) = {
            let window = self.window();
            (window.len(), window.ahead())
        };
        self.stats.report(
            loader,
            Stats {
                announced,
                ahead,
                in_flight: self.tasks.running(),
                limit: self.limit(),
                memory: self.arena.usage(),
                requests: self.measured(),
                ..Stats::default()
            },
        )
    }
}

/// Bytes of the budget that an object of a manifest takes. `mean` is the assumed size if the manifest has none.
pub fn charge(manifest: &Manifest, index: u64, mean: Option<u64>) -> u64 {
    let size = usize::try_from(index).ok().and_then(|index| manifest.size(index));
    Arena::charge(size.or(mean).unwrap_or(UNKNOWN_BYTES))
}

fn panicked(object: Object) -> Error {
    let message = format!("the read of object {} of source {} panicked: a bug", object.index, object.source);
    Error::new(ErrorKind::Io, Operation::Get, "", message)
}

fn unknown_object(object: Object) -> Error {
    let message =
        format!("object {} of source {} is unknown: the source was removed, or a bug", object.index, object.source);
    Error::new(ErrorKind::Config, Operation::Get, "", message)
}

type Delivered = Delivery<Body, Waiter>;

impl TakeOutcome {
    fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests;
