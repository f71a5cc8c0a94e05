//! Shared memory between a rank's process and its DataLoader workers. The owner reads objects into it; workers and the
//! trainer map the same pages, so no bytes are copied.
//!
//! * **Actors.** The *owner* is the process that reads from the store. Only the owner allocates and frees segments. A
//!   *worker* is a process that the owner started: it requests objects, receives segments and returns them. The
//!   *trainer* runs in the owner's process and receives segments that workers offer to it.
//! * **File.** An arena is one sealed `memfd`, mapped whole by each process. It is sparse and much larger than the
//!   budget. The kernel deletes it when the last process that maps it exits; nothing remains in `/dev/shm`, and the
//!   size of `/dev/shm` does not matter.
//! * **Life of a segment.** *Free* → *filling*: a read of the owner writes to it → *ready*: written, not granted yet →
//!   *claimed*: granted to one worker → *offered*: the worker pickled it for the trainer and still maps it →
//!   *transferred*: the worker has dropped it since → *held*: by the trainer → *free*. Each segment has one holder at a
//!   time, and only the holder writes to it. While a segment is *offered*, both processes read it and neither writes
//!   (except to a block, whose batch may contain tensors that the worker keeps, and changes).
//!   The states after *ready* are stored in one word of the file per segment (`sync`).
//! * **Transfer.** A worker drops an offered segment when its Python object is deallocated: from then on nothing in the
//!   worker can reach the memory, even if a library kept a pointer to it. A trainer that receives the offer earlier
//!   copies the bytes and declines the offer; the worker keeps the segment.
//! * **When memory is freed.** A segment of the owner: when its last view is dropped. A claimed segment: when the
//!   worker drops it or exits. A transferred segment: when the trainer drops it, or, after the worker has exited, when
//!   the trainer has not adopted it within a timeout.
//! * **Requests.** A worker has a `WorkerSlot` in the file for each of its concurrent requests. It writes a request there, notifies the owner's eventfd,
//!   and waits on a futex for the answers. Requests and answers are published by a release-store of a sequence number,
//!   so a worker that is killed mid-write exposes nothing. A loader sends one message per batch, which also announces
//!   the objects of later batches. The owner keeps all state and makes all decisions; no lock is shared between
//!   processes. Objects are identified by numbers of the owner, or by names where a worker cannot know the numbers.
//! * **Blocks.** A worker that builds a batch requests a *block* for it: memory that the owner grants like a segment, and
//!   that the worker fills. The trainer adopts it when the batch arrives, and the owner reuses it when the trainer has
//!   dropped all views of it. Each block is a file of its own (`block`), which workers open through `/proc`.
//! * **Fork.** A forked child inherits the mapping and the eventfd and can attach as a worker. It never frees the
//!   segments of its parent of which it inherited copies. A process that drops a segment that it had during a fork returns it
//!   only when all processes that inherited it have exited (`fork::are_gone`); such a block is discarded. If a worker exits
//!   before, the owner waits for the processes that a worker started by fork has forked.
//! * **Descriptors.** A worker keeps none per block. A program may close those of the arena: each is compared before its use.
//! * **Pages.** Pages of free segments stay resident, and are reused, while used and free bytes together fit the
//!   budget. The owner punches them out of the file beyond the budget, when memory is short, and after a while without a
//!   request if no worker is attached.

mod attachment;
mod block;
mod block_pool;
mod claim;
mod grants;
mod layout;
mod map;
mod owner;
mod process;
mod request;
mod serve;
mod size;
mod slots;
mod space;
mod sync;
mod usage;
mod worker;

#[cfg(test)]
mod models;
#[cfg(test)]
mod tests;

pub use attachment::Unanswered;
pub use block::in_block;
pub use claim::{Claim, Offer};
pub use owner::{Arena, Segment};
pub use request::WorkerRequest;
pub use serve::{Answers, Handler, serve};
pub use usage::Usage;
pub use worker::{Announcement, Reply, Worker};
