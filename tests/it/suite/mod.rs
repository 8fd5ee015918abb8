//! The behaviour of every lock, whatever its kind, its topology and the way it is woken.
//!
//! A behaviour is written once, as a function of a [`Setup`]; `matrix!` makes a test of it for each cell.
//! A test is named `suite::<kind>_<topology>_<wake>_<protocol>::<behaviour>`.

mod doubts;
mod ends;
mod faults;
mod holds;
mod waits;

/// What holds for every lock.
macro_rules! matrix {
    ($($cell:ident = $topology:ident($kind:ident, $wake:ident, $protocol:ident);)+) => {
        $(crate::suite::cell! { $cell = $topology($kind, $wake, $protocol):
            crate::suite::holds: [
                says_busy_at_once, renews_for_ten_ttls, inspects, leaks_on_request,
                ends_with_its_ttl_if_never_renewed, ends_after_its_longest_hold, refuses_what_it_does_not_own,
            ],
            crate::suite::waits: [
                gives_up_in_time, hands_over_at_once, takes_over_after_expiry,
                misses_no_release_between_try_and_wait, trusts_no_grant_that_was_long_under_way,
            ],
            crate::suite::ends: [
                releases_on_drop, is_taken_away_by_force, forgets_a_thousand_dropped_futures,
                tells_of_a_loss, settles, survives_its_release_being_dropped,
            ],
            crate::suite::doubts: [
                takes_no_doubtful_release_for_a_success,
                leaks_although_a_renewal_is_under_way, loses_patience_together,
                hears_after_the_runtime_of_the_first_waiter_is_gone, renews_past_a_silent_connection,
                gives_back_what_it_lost_late, releases_what_was_dropped_during_an_outage,
                hears_again_after_its_subscription_broke,
                gives_back_what_was_granted_as_the_line_went_dead,
            ],
            crate::suite::faults: [
                counts_once_when_a_reply_is_lost, survives_a_stopped_server, survives_a_cut_connection,
                survives_script_flush, survives_killed_subscribers, survives_a_restart,
                reports_a_dead_server_in_time, takes_no_late_answer_for_a_success,
                refuses_what_arrives_after_its_client_gave_up, renews_and_releases_without_memory,
            ],
        })+
    };
}

/// What holds for those of whom there is one at a time.
macro_rules! alone {
    ($($cell:ident = $topology:ident($kind:ident, $wake:ident, $protocol:ident);)+) => {
        $(crate::suite::cell! { $cell = $topology($kind, $wake, $protocol):
            crate::suite::holds: [excludes_and_fences, keeps_tokens_growing_over_a_loss, fences_or_not],
            crate::suite::waits: [
                hands_over_in_order, wakes_tasks_of_one_client_in_order, takes_turns_with_those_who_look,
            ],
            crate::suite::doubts: [tokens_grow_over_an_old_snapshot],
            crate::suite::faults: [survives_reset_connections],
        })+
    };
}

macro_rules! cell {
    ($cell:ident = $topology:ident($kind:ident, $wake:ident, $protocol:ident):
        $($module:path: [$($behaviour:ident),+ $(,)?]),+ $(,)?) => {
        mod $cell {
            use crate::support::{Kind, Protocol, Setup, Wake};

            async fn setup() -> Setup {
                Setup::$topology(Kind::$kind, Wake::$wake, Protocol::$protocol).await
            }

            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $behaviour() {
                    use $module as module;
                    module::$behaviour(setup().await).await;
                }
            )+)+
        }
    };
}
use cell;

matrix! {
    mutex_standalone_push_resp2 = standalone(Mutex, Push, Resp2);
    mutex_standalone_push_resp3 = standalone(Mutex, Push, Resp3);
    mutex_standalone_poll_resp2 = standalone(Mutex, Poll, Resp2);
    reentrant_standalone_push_resp2 = standalone(Reentrant, Push, Resp2);
    reentrant_standalone_push_resp3 = standalone(Reentrant, Push, Resp3);
    reentrant_standalone_poll_resp2 = standalone(Reentrant, Poll, Resp2);
    read_standalone_push_resp2 = standalone(Read, Push, Resp2);
    read_standalone_push_resp3 = standalone(Read, Push, Resp3);
    read_standalone_poll_resp2 = standalone(Read, Poll, Resp2);
    write_standalone_push_resp2 = standalone(Write, Push, Resp2);
    write_standalone_push_resp3 = standalone(Write, Push, Resp3);
    write_standalone_poll_resp2 = standalone(Write, Poll, Resp2);
}

alone! {
    mutex_alone_standalone_push_resp2 = standalone(Mutex, Push, Resp2);
    mutex_alone_standalone_push_resp3 = standalone(Mutex, Push, Resp3);
    mutex_alone_standalone_poll_resp2 = standalone(Mutex, Poll, Resp2);
    reentrant_alone_standalone_push_resp2 = standalone(Reentrant, Push, Resp2);
    reentrant_alone_standalone_push_resp3 = standalone(Reentrant, Push, Resp3);
    reentrant_alone_standalone_poll_resp2 = standalone(Reentrant, Poll, Resp2);
    write_alone_standalone_push_resp2 = standalone(Write, Push, Resp2);
    write_alone_standalone_push_resp3 = standalone(Write, Push, Resp3);
    write_alone_standalone_poll_resp2 = standalone(Write, Poll, Resp2);
}
