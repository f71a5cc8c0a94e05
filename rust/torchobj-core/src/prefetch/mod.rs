//! Reads objects ahead of their use, for a process and its DataLoader workers, in the announced order.
//!
//! * **Actors.** One [`Prefetcher`] per process owns an [`Arena`] and reads all objects into it. Callers in the same
//!   process call [`take`](Prefetcher::take); workers send requests through the arena. A loader announces the objects
//!   of later batches with [`announce`](Prefetcher::announce).
//! * **Sources and objects.** A source is a manifest with its clients ([`ListedSource`]), or a set of names that callers
//!   add one by one (`names`). An [`ObjectId`] is the number of a source and the number of an object in it.
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
mod names;
mod prefetcher;
mod reads;
mod shortage;
mod sources;
mod stats;
mod window;
mod workers;

pub use decision::ObjectId;
pub use names::ClientOf;
pub use prefetcher::Prefetcher;
pub use sources::{ListedSource, charge};
pub use stats::Stats;
