//! Declares counters once: the atomics that are counted, their values at one moment, and these values by name.

/// Declares a struct of atomic counters and a struct of their values, which may also have `current` values and other fields.
///
/// A counter and a current value are shown under the name of the field. `torchobj/telemetry/table.py` has their texts.
macro_rules! counters {
    (
        $(#[$counters_doc:meta])*
        $vis:vis struct $counters:ident;
        $(#[$values_doc:meta])*
        pub struct $values:ident {
            counters { $($counter:ident,)+ }
            current { $($current:ident,)* }
            $($(#[$field_doc:meta])* pub $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$counters_doc])*
        #[derive(Debug, Default)]
        $vis struct $counters {
            $($vis $counter: std::sync::atomic::AtomicU64,)+
        }

        $(#[$values_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $values {
            $(#[doc = concat!("The counter `", stringify!($counter), "`.")] pub $counter: u64,)+
            $(#[doc = concat!("The current value `", stringify!($current), "`.")] pub $current: u64,)*
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl $counters {
            /// Adds the counters to these values.
            $vis fn add_to(&self, values: &mut $values) {
                $(values.$counter += self.$counter.load(std::sync::atomic::Ordering::Relaxed);)+
            }
        }

        impl $values {
            /// The counters and the current values by name.
            pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($counter), self.$counter),)+ $((stringify!($current), self.$current),)*].into_iter()
            }
        }
    };
}

pub(crate) use counters;
