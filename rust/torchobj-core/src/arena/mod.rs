//! Memory that a rank's process and its DataLoader workers share: bodies land in it once, and are read where they lie.
//!
//! * **Who.** The *owner* is the process that reads from the store: it alone allocates and frees. A *worker* is a process
//!   that the owner started; it asks for objects, gets segments, and says when it is done with them. The *trainer* is the
//!   owner again, when a worker transfers a segment to it.
//! * **What.** One file without a name (`memfd`), sealed, mapped whole by each: much larger than the budget, and sparse.
//!   It is gone when the last process that has it is gone; nothing is left in `/dev/shm`, whose size does not matter.
//! * **The life of a segment.** *Filling*: a read of the owner's writes to it. *Landed*: written, and nobody else's yet.
//!   *Claimed*: granted to one worker. *Offered*: the worker pickled it for the trainer, and still has it. *Transferred*:
//!   the worker has dropped it since. *Held*: the trainer's. *Free*. At each moment it has one owner, who may write to it;
//!   while it is *offered* both processes read it and neither writes. A word in the file tells these states apart.
//! * **Transfer.** A worker drops an offered segment when its Python object is deallocated: only then can nothing in the
//!   worker reach the memory, whatever library kept a pointer to it. A trainer that gets the offer earlier copies the
//!   bytes and declines, and the segment stays the worker's.
//! * **When it is free again.** A segment in the owner's process: when the last view of it is gone. A claimed one: when
//!   the worker dropped it, or died. A transferred one: when the trainer took and dropped it, or the worker died and the
//!   trainer did not take it for a while.
//! * **Asking.** A worker has a lane: it writes a request, rings the owner's bell (an eventfd), and sleeps on a futex
//!   until all answers are there. A killed worker leaves nothing half-written that anybody reads: numbers publish. It is
//!   one message a batch, which also names what this worker will want next, so that every decision is the owner's, who
//!   keeps the only books; nothing is locked across processes. Objects are asked for by the owner's numbers, or by names
//!   where a worker cannot know those.
//! * **Fork.** A forked child inherits the mapping and the bell. It may attach as a worker; what it has copies of, the
//!   parent's segments, it never frees.
//! * **Memory.** Pages of what is free are used again while used and free ones together fit the budget; beyond it, and
//!   when nothing is read for a while, they are punched out of the file.

mod grants;
mod layout;
mod map;
mod owner;
mod request;
mod segment;
mod serve;
mod size;
mod space;
mod words;
mod worker;

#[cfg(test)]
mod models;
#[cfg(test)]
mod tests;

pub use owner::{Arena, Usage};
pub use request::{Asked, Request};
pub use segment::Segment;
pub use serve::{Answers, Handler, serve};
pub use worker::{Ahead, Claim, Offer, Reply, Unanswered, Worker};
