//! Reads objects ahead of their use, for a process and its DataLoader workers, in the announced order.
//!
//! * **Actors.** One [`Prefetcher`] per process owns an [`Arena`] and reads all objects into it. Callers in the same
//!   process call [`take`](Prefetcher::take); workers send requests through the arena. A loader announces the objects
//!   of later batches with [`announce`](Prefetcher::announce).
//! * **Sources and objects.** A source is a manifest with its clients ([`ListedSource`]), or a set of references that
//!   callers add one by one (`names`); a [`SourceKey`](crate::source_key::SourceKey) identifies an object of either. An
//!   [`ObjectId`] is the number of a source and the number of an object in it.
//! * **Processes.** A [`PrefetcherHandle`] leads to the prefetcher from the process that owns it, from a worker that inherits
//!   the arena or received its descriptors, and from their forked children. An [`AnnouncingIterator`] announces from the
//!   process that made it.
//! * **Modules.** `prefetcher` announces and takes objects. `window` keeps the announced order and decides which object
//!   is read or evicted next; it does no I/O. `reads` runs the reads that `window` selects, as a source of the engine, and
//!   reads neighbouring ranges of one object with one request. `workers` answers the requests of workers. `sources`
//!   has the objects, and the clients with their limits and metrics. `shortage` writes the warnings about memory.
//! * **Memory.** A read allocates its segment when the response's length is known, and a reservation counts against the
//!   budget until then. Announced reads stay within the budget; demanded reads start although they exceed it. A segment
//!   is freed when its caller or worker drops it; the prefetcher continues then.
//!
//! An announcement is a hint: `take` returns every object, announced or not, and an announced one earlier.

mod decision;
mod handle;
mod iterator;
mod names;
mod prefetcher;
mod reads;
mod shortage;
mod sources;
mod stats;
mod window;
mod workers;

pub use decision::ObjectId;
pub use handle::{PrefetcherHandle, existing, own, work_for_loader};
pub use iterator::{AnnouncingIterator, Process};
pub use names::ClientOf;
pub use prefetcher::Prefetcher;
pub use sources::{ListedSource, charge};
pub use stats::Stats;
