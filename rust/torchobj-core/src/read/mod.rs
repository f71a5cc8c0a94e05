//! Reading: which requests an object takes (`plan`), one object (`fetch`), a second
//! request for what is late (`hedge`), many at a time (`many`), and a file-like
//! reader that fetches ahead of its position (`ahead`).

mod ahead;
mod fetch;
mod hedge;
mod many;
mod plan;

pub use ahead::{ReadAhead, Window};
pub use fetch::{Landed, Read, Target};
pub use many::{Job, get_many};
pub(crate) use plan::parts;
