//! Memory that bytes land in. The only module of this crate with `unsafe`.
//!
//! A [`Memory`] is a region of bytes: ours, or lent by the caller until it is dropped. While it is being written it is
//! cut into [`Dest`]s, disjoint pieces each with one writer, and nobody but that writer can read it. A writer may sit in a thread or
//! in a task that was cancelled a moment ago: the region lives until the last `Dest` is gone, and only then does
//! [`Landing::finish`] turn it into a [`Buffer`] that can be read. So no byte changes under a reader's eyes, and no
//! writer writes to memory that was given back.
//!
//! Every region is initialised before it becomes a `Dest` (zeroed by the kernel, or recycled), so `&mut [u8]` is
//! always sound. Regions of 1 KiB and more are recycled through [`pool`]: fresh pages cost more than the copy into
//! them (measured: 110 KiB bodies, 27 faults).

mod dest;
mod memory;
mod pool;

pub use dest::{Buffer, Dest, Landing, Progress};
pub use memory::Memory;
