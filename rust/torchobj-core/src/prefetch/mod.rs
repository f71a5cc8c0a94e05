//! Reads ahead of who uses it: one prefetcher for a process and its workers, in the order that was announced.
//!
//! `window` keeps the books and decides what is next; `drive` reads; `answer` serves workers through the arena. A
//! *source* is a manifest with its clients, or `names` that come one by one; an object is a source and a number.
//! Announcing is a hint: whoever takes an object gets it, announced or not, and what was announced only comes sooner.

mod answer;
mod drive;
mod job;
mod limits;
mod names;
mod shortage;
mod stats;
mod window;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use tokio::sync::oneshot;

use self::job::Found;
pub use self::job::Object;
pub use self::names::Clients;
use self::names::Names;
pub use self::stats::Stats;
use self::stats::Waiting;
use self::window::{Delivery, Window};
use crate::arena::{Answers, Arena, Segment};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::manifest::Manifest;
use crate::object_ref::ObjectRef;
use crate::read::Landed;
use crate::runtime::runtime;
use crate::transfer::{Metrics, Permits};

/// What is taken for the size of an object that is not known, before one was read.
const UNKNOWN_BYTES: u64 = 128 << 10;

/// A manifest, and who reads its objects.
#[derive(Clone, Debug)]
pub struct Source {
    /// The objects.
    pub manifest: Arc<Manifest>,
    /// For each of the manifest's bases.
    pub clients: Vec<Arc<Client>>,
}

/// What the number of an object is a number of.
#[derive(Debug)]
enum Known {
    Listed(Source),
    Named(Names),
}

/// What a read leaves: bytes in a segment.
#[derive(Debug)]
struct Body {
    landed: Landed,
    segment: Arc<Segment>,
}

/// Who waits for an object.
#[derive(Debug)]
enum Wish {
    /// A worker.
    Answer { answers: Arc<Answers>, position: usize, waiting: Arc<Waiting> },
    /// This process.
    Local(oneshot::Sender<Result<Landed>>),
}

impl Wish {
    /// Whether nobody waits any more.
    fn gone(&self) -> bool {
        match self {
            Self::Answer { answers, .. } => answers.gone(),
            Self::Local(sender) => sender.is_closed(),
        }
    }
}

/// Reads ahead for this process and its workers.
#[derive(Debug)]
pub struct Prefetcher {
    arena: Arc<Arena>,
    window: Mutex<Window<Body, Wish>>,
    sources: Mutex<HashMap<u64, Known>>,
    announcing: Mutex<HashMap<(u32, u32), u64>>,
    next: AtomicU64,
    in_flight: AtomicUsize,
    /// Whether a thread found as many drivers as may be since a driver was last given up.
    refused: AtomicBool,
    /// Of the sources that there are, each once.
    permits: Mutex<Vec<Arc<Permits>>>,
    /// Of the clients of all sources that there ever were, each once: clients live as long as the process.
    metrics: Mutex<Vec<Arc<Metrics>>>,
    /// Of the objects whose size was not known.
    mean_bytes: AtomicU64,
    stats: stats::Counters,
    shortage: Mutex<shortage::Shortage>,
    /// Since when nothing is read, and how much was by then.
    idle: Mutex<Option<(Instant, u64)>>,
}

impl Prefetcher {
    /// A prefetcher whose segments take `budget` bytes. It makes as many reads at a time as the clients of its sources
    /// permit, less what they keep for others. It serves workers from now on, for as long as the process lives.
    ///
    /// # Errors
    /// The system refuses the arena, or to wait for who asks.
    pub fn start(budget: u64) -> io::Result<Arc<Self>> {
        let prefetcher = Self::unserved(budget)?;
        let service = {
            let _context = runtime().enter();
            crate::arena::serve(prefetcher.arena.clone(), prefetcher.clone())?
        };
        runtime().spawn(async move {
            if let Err(error) = service.await {
                log::error!("workers get no answers: {error}");
            }
        });
        Ok(prefetcher)
    }

    /// The same, for this process alone.
    fn unserved(budget: u64) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            arena: Arena::create(budget)?,
            window: Mutex::default(),
            sources: Mutex::default(),
            announcing: Mutex::default(),
            next: AtomicU64::new(1),
            in_flight: AtomicUsize::new(0),
            refused: AtomicBool::new(false),
            permits: Mutex::default(),
            metrics: Mutex::default(),
            mean_bytes: AtomicU64::new(UNKNOWN_BYTES),
            stats: stats::Counters::default(),
            shortage: Mutex::default(),
            idle: Mutex::default(),
        }))
    }

    /// Where bodies land.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn window(&self) -> MutexGuard<'_, Window<Body, Wish>> {
        self.window.lock().expect("no holder of this lock panics")
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<u64, Known>> {
        self.sources.lock().expect("no holder of this lock panics")
    }

    fn new_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes a source known. Returns its number.
    pub fn add_source(&self, source: Source) -> u64 {
        let _inside = fork::enter();
        let number = self.new_number();
        self.see_metrics(&source.clients);
        let mut sources = self.sources();
        sources.insert(number, Known::Listed(source));
        self.see_permits(&sources);
        number
    }

    /// Makes a source known whose objects are named as they come. Returns its number.
    pub fn add_names(&self, clients: Arc<Clients>) -> u64 {
        let _inside = fork::enter();
        let number = self.new_number();
        self.sources().insert(number, Known::Named(Names::new(clients)));
        number
    }

    /// The objects of `source` that have these names, to be announced at once: the number of what is not announced is
    /// forgotten some time.
    pub fn objects<'a>(&self, source: u64, names: impl Iterator<Item = &'a ObjectRef>) -> Vec<Object> {
        self.sweep(source);
        let number = |name: &ObjectRef| {
            let _inside = fork::enter();
            Wanted::Name { source, record: name.to_bytes() }.object(&mut self.sources())
        };
        names.map(number).collect()
    }

    /// Forgets names that nobody uses, once they are many.
    fn sweep(&self, source: u64) {
        let _inside = fork::enter();
        if let Some(Known::Named(names)) = self.sources().get_mut(&source)
            && names.is_full()
        {
            names.sweep(&self.window().used_of(source));
        }
    }

    /// Forgets a source. What is being read of it is read to its end.
    pub fn remove_source(&self, number: u64) {
        let _inside = fork::enter();
        let mut sources = self.sources();
        sources.remove(&number);
        self.see_permits(&sources);
    }

    /// A new iterator: what is announced for it can be cancelled together.
    pub fn new_iterator(&self) -> u64 {
        self.new_number()
    }

    /// Says that these objects will be taken, in this order, behind what was announced for the iterator before.
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

    /// How many bytes are announced for an iterator and not taken.
    pub fn pending(&self, iterator: u64) -> u64 {
        let _inside = fork::enter();
        self.window().announced_bytes(iterator)
    }

    /// Forgets what was announced for an iterator and not taken.
    pub fn cancel(self: &Arc<Self>, iterator: u64) {
        let bodies = {
            let _inside = fork::enter();
            self.window().cancel(iterator)
        };
        drop(bodies);
        self.pump();
    }

    /// What an object will take of the budget.
    fn charge(&self, sources: &HashMap<u64, Known>, object: Object) -> u64 {
        let mean = self.mean_bytes.load(Ordering::Relaxed);
        match sources.get(&object.source) {
            Some(Known::Listed(source)) => charge(&source.manifest, object.index, Some(mean)),
            Some(Known::Named(names)) => {
                let length = names.get(object.index).and_then(|name| name.length());
                Arena::charge(length.unwrap_or(mean))
            }
            None => Arena::charge(mean),
        }
    }

    /// Takes objects, all at once. Results are in their order. Dropping the future forgets the results.
    pub async fn take(self: &Arc<Self>, objects: &[Object]) -> Vec<Result<Landed>> {
        self.take_each(objects.iter().copied().map(Wanted::Number)).await
    }

    /// Takes objects of `source` by their names; otherwise as [`take`](Self::take).
    pub async fn take_by_name(self: &Arc<Self>, source: u64, names: &[Arc<ObjectRef>]) -> Vec<Result<Landed>> {
        self.sweep(source);
        self.take_each(names.iter().map(|name| Wanted::Name { source, record: name.to_bytes() })).await
    }

    async fn take_each(self: &Arc<Self>, wanted: impl ExactSizeIterator<Item = Wanted>) -> Vec<Result<Landed>> {
        let _waiting = self.stats.waiting();
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..wanted.len()).map(|_| oneshot::channel()).unzip();
        self.wish(wanted.zip(senders.into_iter().map(Wish::Local)));
        let mut taken = Vec::with_capacity(receivers.len());
        for receiver in receivers {
            taken.push(receiver.await.unwrap_or_else(|_| Err(lost())));
        }
        taken
    }

    /// Takes objects for whoever waits for them.
    fn wish(self: &Arc<Self>, wishes: impl Iterator<Item = (Wanted, Wish)>) {
        let mut deliveries = Vec::new();
        {
            let _inside = fork::enter();
            for (wanted, wish) in wishes {
                // Held until the number is in use: no sweep comes between.
                let mut sources = self.sources();
                let object = wanted.object(&mut sources);
                let charge = self.charge(&sources, object);
                let (found, delivery) = self.window().take(object, charge, wish);
                self.stats.found(found);
                deliveries.extend(delivery);
            }
        }
        deliveries.into_iter().for_each(|delivery| self.deliver(delivery));
        self.pump();
    }

    /// Whether anything is announced, or waited for, and not taken.
    pub fn announced(&self) -> bool {
        let _inside = fork::enter();
        self.window().len() > 0
    }

    /// What it did and does.
    pub fn stats(&self) -> Stats {
        let _inside = fork::enter();
        let (announced, ahead) = {
            let window = self.window();
            (window.len(), window.ahead())
        };
        self.stats.report(Stats {
            announced,
            ahead,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            limit: self.limit(),
            memory: self.arena.usage(),
            requests: self.measured(),
            ..Stats::default()
        })
    }
}

/// What an object of a manifest will take of a budget. `mean` is for those whose size is not known, where one was read.
pub fn charge(manifest: &Manifest, index: u64, mean: Option<u64>) -> u64 {
    let size = usize::try_from(index).ok().and_then(|index| manifest.get(index)?.size);
    Arena::charge(size.or(mean).unwrap_or(UNKNOWN_BYTES))
}

/// An object that somebody takes.
#[derive(Debug)]
enum Wanted {
    Number(Object),
    /// What [`ObjectRef::to_bytes`] made, of a source of names.
    Name {
        source: u64,
        record: Vec<u8>,
    },
}

impl Wanted {
    fn object(self, sources: &mut HashMap<u64, Known>) -> Object {
        match self {
            Self::Number(object) => object,
            Self::Name { source, record } => {
                let index = match sources.get_mut(&source) {
                    Some(Known::Named(names)) => names.number(&record),
                    // Of no source that is there: reading it says so.
                    _ => u64::MAX,
                };
                Object { source, index }
            }
        }
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Cancelled, Operation::Get, "", "a read was lost: a bug")
}

fn broken(object: Object) -> Error {
    let message = format!("the read of object {} of source {} panicked: a bug", object.index, object.source);
    Error::new(ErrorKind::Io, Operation::Get, "", message)
}

fn unknown(object: Object) -> Error {
    let message = format!("nobody knows object {} of source {}", object.index, object.source);
    Error::new(ErrorKind::Config, Operation::Get, "", message)
}

type Delivered = Delivery<Body, Wish>;

impl Found {
    fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests;
