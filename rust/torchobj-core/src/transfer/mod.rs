//! The policies that stand once, over every store: how many requests at a time, how fast, how long to wait, when to try again or a
//! second time; and what the requests met, counted.

mod adapt;
mod attempts;
mod histogram;
mod lateness;
mod metrics;
mod pace;
mod permits;
mod policy;
mod quota;
mod watch;

pub use adapt::{Adapt, Seen};
pub use attempts::Attempts;
pub(crate) use attempts::backoff;
pub use histogram::{Counts, Histogram};
pub(crate) use lateness::Lateness;
pub use metrics::{Measured, Metrics};
pub use pace::Pace;
pub use permits::{Permit, Permits};
pub use policy::Policy;
pub use quota::Quota;
pub(crate) use watch::{Stall, moving};
pub use watch::{idle, within};
