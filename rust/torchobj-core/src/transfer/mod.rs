//! The policies that stand once, over every store: how many requests at a time, how long to wait, when to try again.

mod attempts;
mod permits;
mod policy;
mod quota;
mod watch;

pub use attempts::Attempts;
pub use permits::{Permit, Permits};
pub use policy::Policy;
pub use quota::Quota;
pub use watch::{idle, within};
