//! Reading: which requests an object takes (`plan`), one object (`fetch`), a second
//! request for what is late (`hedge`), many at a time (`many`), segments of objects into
//! memory of their own (`coalesce`, `strips`, `scatter`), both ends of an object (`ends`), and a
//! file-like reader that fetches ahead of its position (`ahead`).

mod ahead;
mod coalesce;
mod ends;
mod fetch;
mod hedge;
mod many;
mod plan;
mod response;
mod scatter;
#[cfg(test)]
mod slow_bodies;
mod strips;

pub use ahead::{ReadAhead, Window};
pub use ends::Ends;
pub use fetch::{Landed, Read, Target};
pub use many::{Job, get_many};
pub(crate) use plan::parts;
pub use scatter::{Scatter, Scattered, Segment, scatter};
