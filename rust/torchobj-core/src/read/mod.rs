//! Reads objects. `plan` divides an object into requests and `fetch` runs them, `response` checks their responses and
//! `hedge` sends a second request when a response is late. On top of these: many objects concurrently (`many`), ranges
//! into separate memory (`scatter`, with `coalesce` and `scatter_list`; `ranges` with one request), slices of arrays (`slice_plan`, with `tile`),
//! both ends of an object (`head_and_tail`), and a file-like reader with read-ahead (`ahead`).

mod ahead;
mod coalesce;
mod fetch;
mod head_and_tail;
mod hedge;
mod many;
mod plan;
mod ranges;
mod response;
mod scatter;
mod scatter_list;
mod slice_plan;
#[cfg(test)]
mod slow_bodies;
mod tile;
mod verify;

pub use ahead::{ReadAhead, ReadAheadConfig};
pub(crate) use coalesce::RangeGroup;
pub use fetch::{ReadRequest, ReadResult};
pub use head_and_tail::HeadAndTail;
pub use many::{ClientRead, get_many, try_get_many};
pub(crate) use plan::{part_bytes, parts};
pub(crate) use response::{Expected, First};
pub use scatter::{ScatterRange, ScatterRead, ScatterResult, scatter};
pub use slice_plan::{BufferedRead, Frame, Outcome, SlicePlan, Wave};
pub use tile::{Slice, Tile};
pub(crate) use verify::{crc_of, difference, mismatch};
