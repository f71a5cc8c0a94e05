//! The policies above every store: concurrency limit, rate limit, timeouts, retries and hedge delay, and the metrics of the
//! requests. A store makes one attempt per call.

mod aimd;
mod attempts;
mod concurrency;
mod hedge_delay;
mod histogram;
mod memory_limit;
mod metrics;
mod quota;
mod rate_limit;
mod settings;
mod timeouts;

pub use aimd::{Aimd, Sample};
pub use attempts::Attempts;
pub(crate) use attempts::backoff;
pub use concurrency::{ConcurrencyLimit, Permit};
pub(crate) use hedge_delay::HedgeDelay;
pub use histogram::{Counts, Histogram};
pub(crate) use memory_limit::{MemoryLimit, ReservedMemory};
pub(crate) use metrics::InFlight;
pub use metrics::{Metrics, MetricsSnapshot, Outcome};
pub use quota::Quota;
pub use rate_limit::RateLimit;
pub use settings::Policy;
pub(crate) use timeouts::{Stall, until_stalled};
pub use timeouts::{with_idle_timeout, within};
