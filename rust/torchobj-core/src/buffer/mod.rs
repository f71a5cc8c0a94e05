//! Memory that reads write to. With `arena` and `fork`, the only modules of this crate with `unsafe`.
//!
//! A [`Memory`] is a region of bytes that this process owns, or that a caller lends until the `Memory` is dropped.
//! While it is being written it is divided into disjoint [`Dest`]s, each with one writer; nothing can read it. A writer
//! may be a thread, or a task that was just cancelled, so the region lives until its last `Dest` is dropped. Only then
//! does [`PendingBuffer::finish`] turn it into a [`Buffer`] that can be read. Therefore no byte changes while it is
//! read, and no writer writes to freed memory.
//!
//! A [`SharedBuffer`] divides a finished read into views, each a `Buffer` that keeps the whole region alive.
//!
//! Every region is initialised before it becomes a `Dest` (zeroed by the kernel, or recycled), so `&mut [u8]` is always
//! sound. Regions of at least 1 KiB are recycled through [`pool`]: faults on new pages cost more than the copy into
//! them (measured: 27 faults for a body of 110 KiB).

mod dest;
mod memory;
mod pool;
#[cfg(target_os = "linux")]
mod sealed_file;
mod view;

pub use dest::{Buffer, Dest, PendingBuffer, ReceivedBytes};
pub use memory::Memory;
#[cfg(target_os = "linux")]
pub use sealed_file::SealedFile;
pub use view::SharedBuffer;
