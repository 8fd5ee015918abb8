//! Wake-ups on one server: which messages a waiter trusts, broken subscriptions, and how often a
//! waiter polls.

use std::time::{Duration, Instant};

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Error, Locks, Mutex, MutexGuard, Options, Wakeups};
use tokio::task::JoinHandle;

use crate::support::{
    LONGEST_WAIT, NEVER, Proxy, Server, Stopwatch, count_waiters, eventually, notified_only, queued, soon,
    ttl,
};

const QUEUE: &str = "{lock:x}:waiters";

/// A client whose requests and whose subscription pass through separate proxies.
struct Client {
    requests: Proxy,
    messages: Proxy,
    locks: Locks,
}

impl Client {
    async fn of(server: &Server) -> Client {
        let requests = Proxy::start(server.port()).await;
        let messages = Proxy::at("127.0.0.3", vec![server.port()]).await;
        let pool = Config::from_url(requests.url()).create_pool(Some(Runtime::Tokio1)).unwrap();
        // Long timeouts, so that a delayed reply is not a failure.
        let options = Options::new().poll_cap(NEVER).node_timeout(NEVER);
        let builder = Locks::builder().pool(pool).subscriber(messages.url());
        let locks = builder.options(options).connect().await.unwrap();
        Client { requests, messages, locks }
    }

    /// Cuts the subscription, and waits until it is replaced.
    async fn subscribes_again(&self, server: &Server) {
        let before = server.subscribers().await;
        self.messages.cut();
        eventually("the client is subscribed again", || async {
            let now = server.subscribers().await;
            now.len() == 1 && now != before
        })
        .await;
    }

    /// Ends the client before its proxies, so that it does not try to reconnect.
    async fn end(self) {
        drop(self.locks);
        self.requests.outlive_clients().await;
        self.messages.outlive_clients().await;
    }
}

async fn wait_in_queue(server: &Server, mutex: Mutex) -> JoinHandle<Result<MutexGuard, Error>> {
    let count = count_waiters(QUEUE);
    queued(async || vec![server.run(&count).await], async move { mutex.lock().await }).await
}

/// Starts a waiter whose client is subscribed and has sampled the server's clock. A client
/// subscribes with its first waiter, once the server has answered that one.
async fn notified(server: &Server, locks: &Locks) -> JoinHandle<Result<MutexGuard, Error>> {
    let mutex = locks.mutex("x").unwrap();
    eventually("the client is subscribed", || async {
        let is_subscribed = server.subscribers().await.len() == 1;
        assert!(is_subscribed || mutex.lock_timeout(Duration::from_millis(200)).await.is_err());
        is_subscribed
    })
    .await;
    eventually("the waiter has left the queue", || async { server.queues().await.is_empty() }).await;
    let waiting = wait_in_queue(server, mutex).await;
    server.all_notified("lock:x").await;
    waiting
}

/// A new connection may lead to another server with another clock. A message is dated by the clock
/// that was sampled on the old connection, so the waiter polls instead of trusting it.
#[tokio::test(flavor = "multi_thread")]
async fn message_is_not_trusted_after_the_request_connection_was_replaced() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    // This loads the release script, so that one release is one script run.
    holder.lock().await.unwrap().release().await.unwrap();
    let guard = holder.lock().await.unwrap();
    let waiting = notified(&server, &client.locks).await;
    client.requests.cut();
    // Any request notices the cut and uses a new connection.
    assert!(!client.locks.mutex("other").unwrap().is_locked().await.unwrap());
    let before = server.scripts_run().await;
    guard.release().await.unwrap();
    let next = soon("the lock is granted", waiting).await.unwrap().unwrap();
    // A scheduled poll of the waiter counts as well, if the test is slow.
    assert!(server.scripts_run().await >= before + 2, "one release, and one poll after the message");
    next.release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// The subscription is replaced while a poll is in flight. The message arrives on a later
/// subscription than the one that existed when the poll was sent, perhaps from another server.
#[tokio::test(flavor = "multi_thread")]
async fn message_is_not_trusted_after_the_subscription_was_replaced() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    // This loads the release script, so that one release is one script run.
    holder.lock().await.unwrap().release().await.unwrap();
    let guard = holder.lock().await.unwrap();
    let waiting = notified(&server, &client.locks).await;
    // Its reply comes behind that to the waiter's request, which is not held back then.
    assert!(client.locks.mutex("x").unwrap().is_locked().await.unwrap());
    let before = server.scripts_run().await;
    client.requests.hold_replies(true);
    // The waiter polls once the client is subscribed again. The reply, that the lock is held, is
    // delayed.
    client.subscribes_again(&server).await;
    eventually("the waiter polls", || async { server.scripts_run().await > before }).await;
    client.subscribes_again(&server).await;
    let before = server.scripts_run().await;
    guard.release().await.unwrap();
    client.requests.hold_replies(false);
    let next = soon("the lock is granted", waiting).await.unwrap().unwrap();
    assert!(server.scripts_run().await >= before + 2, "one release, and one poll after the message");
    next.release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// A message does not arrive although the subscription is up: the waiter gets the lock at its next
/// poll.
#[tokio::test(flavor = "multi_thread")]
async fn message_that_does_not_arrive_costs_one_poll() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    let guard = holder.lock().await.unwrap();
    let waiting = notified(&server, &client.locks).await;
    let (published, subscribers) = (server.published().await, server.subscribers().await);
    client.messages.hold_replies(true);
    guard.release().await.unwrap();
    let next = soon("the lock is granted", waiting).await.unwrap().unwrap();
    assert_eq!(server.published().await, published + 1, "the waiter was notified");
    assert_eq!(server.subscribers().await, subscribers, "the subscription stayed up");
    client.messages.hold_replies(false);
    next.release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// Messages are lost while the subscription is broken, so all waiters poll as soon as it is
/// replaced.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_poll_as_soon_as_a_broken_subscription_is_replaced() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    let (mut subscribed, mut granted) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let guard = holder.lock().await.unwrap();
        let waiting = notified(&server, &client.locks).await;
        // Its next pause takes two seconds then.
        let polled = server.scripts_run().await + 3;
        eventually("the waiter's pauses grow", || async { server.scripts_run().await >= polled }).await;
        client.messages.set_drops_requests(true);
        client.messages.cut();
        let start = Stopwatch::start();
        eventually("the subscription has ended", || async { server.subscribers().await.is_empty() }).await;
        guard.release().await.unwrap();
        client.messages.set_drops_requests(false);
        client.messages.cut(); // also a connection that was made meanwhile
        eventually("the client is subscribed again", || async { server.subscribers().await.len() == 1 })
            .await;
        subscribed.push(start.stop());
        let start = Stopwatch::start();
        let next = soon("the lock is granted", waiting).await.unwrap().unwrap();
        granted.push(start.stop());
        next.release().await.unwrap();
    }
    let shortest = |times: &[Stopwatch]| times.iter().map(Stopwatch::undisturbed).min().unwrap();
    // A silent subscription is checked after five seconds; a closed one is replaced at once.
    assert!(shortest(&subscribed) < Duration::from_secs(2), "{subscribed:?}");
    assert!(shortest(&granted) < Duration::from_millis(500), "{granted:?}");
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// The pause before another try grows only while tries fail: else a client would be without
/// messages for five seconds after the ninth lost subscription of its life.
#[tokio::test(flavor = "multi_thread")]
async fn the_ninth_lost_subscription_is_replaced_as_fast_as_the_first() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let client = Client::of(&server).await;
    let guard = holder.lock().await.unwrap();
    let waiting = notified(&server, &client.locks).await;
    let mut replaced = Vec::new();
    for _ in 0..9 {
        let start = Stopwatch::start();
        client.subscribes_again(&server).await;
        replaced.push(start.stop());
    }
    let last = replaced[6..].iter().map(Stopwatch::undisturbed).min().unwrap();
    assert!(last < Duration::from_secs(1), "{replaced:?}");
    guard.release().await.unwrap();
    soon("the lock is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}

/// The shortest pause between two polls of a waiter once its pauses have grown, by the marks that
/// each poll leaves, on the server's clock. A busy machine makes single pauses longer, and a slow
/// look misses some marks, so it looks until a pause was shorter than `most`.
async fn pause(server: &Server, options: Options, most: Duration) -> Duration {
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let locks = server.locks_with(options).await;
    let waiting = wait_in_queue(server, locks.mutex("x").unwrap()).await;
    // A connection for each look would take longer than some pauses.
    let mut connection = server.connection().await;
    let look = ["4503599627370496", "+inf", "WITHSCORES"];
    let look = redis::cmd("ZRANGEBYSCORE").arg(QUEUE).arg(&look).to_owned();
    let (start, mut shortest) = (Instant::now(), LONGEST_WAIT);
    let (mut attempt, mut last, mut marks) = (String::new(), 0, 0);
    while (marks < 8 || shortest >= most) && start.elapsed() < LONGEST_WAIT {
        // Beyond all waiters; how far is when the mark expires, in microseconds.
        let marked: Vec<(String, f64)> = look.query_async(&mut connection).await.unwrap();
        let seen = marked.into_iter().rfind(|(mark, _)| mark.starts_with("seen "));
        let (mark, time) = seen.map_or_else(Default::default, |(mark, score)| (mark, score as u64));
        // Another attempt, since the client is subscribed: its pauses are short again.
        if attempt != mark {
            (attempt, marks) = (mark, 0);
        }
        if last != time {
            marks += 1;
            if marks > 3 {
                shortest = shortest.min(Duration::from_micros(time - last));
            }
            last = time;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    waiting.abort();
    guard.release().await.unwrap();
    drop((holder, locks));
    server.assert_nothing_left().await;
    shortest
}

/// Compares the shortest of several pauses: a mistake makes all of them longer.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_poll_every_poll_cap_or_most_of_a_claim() {
    let server = Server::start().await;
    let millis = Duration::from_millis;
    let options = || Options::new().ttl(millis(900));
    let notified = || options().wakeups(Wakeups::Push);
    let polling = || options().wakeups(Wakeups::Poll);
    for (what, options, least, most) in [
        ("notified", notified().poll_cap(NEVER), 585, 800),
        ("notified, with a cap", notified().poll_cap(millis(80)), 60, 300),
        ("polling", polling().poll_cap(NEVER), 75, 300),
        ("polling, with a cap", polling().poll_cap(millis(20)), 15, 60),
    ] {
        let pause = pause(&server, options, millis(most)).await;
        println!("FIG {what}: {pause:?}");
        // A random part of up to a sixteenth is subtracted from the cap or from 0.7 of the claim.
        // With a whole claim, a pause would be at least 843 ms.
        assert!(pause >= millis(least), "{what}: {pause:?}");
        assert!(pause < millis(most), "{what}: {pause:?}");
    }
}

/// The channel of the only waiter, and a forged message that grants it the mutex. A user that may
/// publish and read the queue can send it. None while the waiter's entry is replaced.
async fn forged(server: &Server) -> Option<(String, String)> {
    let queue: Vec<String> = server.run(&["ZRANGE", QUEUE, "0", "0"]).await;
    let words: Vec<&str> = queue.first()?.split(' ').collect();
    let (attempt, channel) = (words[0], words[3]);
    let [seconds, micros] = server.run::<[u64; 2]>(&["TIME"]).await;
    Some((channel.to_owned(), format!("{attempt} 999999 {} lock:x", seconds * 1_000_000 + micros)))
}

async fn forged_once_queued(server: &Server) -> (String, String) {
    let forged = async {
        loop {
            if let Some(forged) = forged(server).await {
                break forged;
            }
        }
    };
    soon("the waiter has an entry", forged).await
}

async fn publish(server: &Server, (channel, message): &(String, String)) {
    assert_eq!(server.run::<i64>(&["PUBLISH", channel, message]).await, 1);
}

/// The trust boundary: a user that may publish on a waiter's channel can deceive it for a while.
#[tokio::test(flavor = "multi_thread")]
async fn forged_message_is_trusted_until_the_first_renewal() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let trusting = server.locks_with(notified_only()).await;
    let waiting = notified(&server, &trusting).await;
    // Its first poll may still be in flight; until then, messages are not trusted. So repeat.
    let trusted = soon("the waiter trusts the message", async {
        while !waiting.is_finished() {
            if let Some((channel, message)) = forged(&server).await {
                let _: i64 = server.run(&["PUBLISH", &channel, &message]).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        waiting.await.unwrap().unwrap()
    });
    let trusted = trusted.await;
    assert!(!guard.lease().is_lost());
    soon("the first renewal ends the lease", trusted.lease().lost()).await;
    drop((trusted, trusting, guard, holder));
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_message_is_not_trusted_with_verified_wakeups() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let careful = server.locks_with(notified_only().wakeups(Wakeups::Verify)).await;
    let mut waiting = notified(&server, &careful).await;
    for _ in 0..20 {
        let forged = forged_once_queued(&server).await;
        let before = server.scripts_run().await;
        publish(&server, &forged).await;
        eventually("the waiter polls", || async { server.scripts_run().await > before }).await;
    }
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut waiting).await.is_err());
    // The release still notifies it: by itself, it polls after more than a second.
    let start = Stopwatch::start();
    guard.release().await.unwrap();
    let next = soon("the lock is granted", waiting).await.unwrap().unwrap();
    println!("FIG verified after {:?}", start.elapsed());
    assert!(start.undisturbed() < Duration::from_secs(1), "{start:?}");
    assert_eq!(server.run::<i64>(&["EXISTS", "lock:x"]).await, 1);
    next.release().await.unwrap();
    drop((holder, careful));
    server.assert_nothing_left().await;
}

/// A user that may publish can make waiters poll, at most ten times a second.
#[tokio::test(flavor = "multi_thread")]
async fn flood_of_messages_causes_at_most_ten_polls_a_second() {
    let server = Server::start().await;
    let holder = server.locks_with(ttl(60_000)).await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let locks = server.locks_with(notified_only()).await;
    let waiting = notified(&server, &locks).await;
    let (channel, message) = forged_once_queued(&server).await;
    // Without a valid date, the message is only a hint to poll.
    let message = message.replace(" 999999 ", " none ");
    let (before, start) = (server.scripts_run().await, Stopwatch::start());
    let mut publisher = server.connection().await;
    let (mut sent, mut polls) = (0, 0);
    // If messages came faster, the server would end the subscription at its buffer limit.
    let mut pace = tokio::time::interval(Duration::from_millis(10));
    // Without a message, ten polls take fourteen seconds.
    let goes_on = |polls| start.elapsed() < Duration::from_secs(3) || polls < 10;
    while sent <= 2_000 || goes_on(polls) && start.undisturbed() < Duration::from_secs(10) {
        pace.tick().await;
        let mut many = redis::pipe();
        (0..50).for_each(|_| _ = many.cmd("PUBLISH").arg(&channel).arg(&message));
        many.query_async::<()>(&mut publisher).await.unwrap();
        sent += 50;
        polls = server.scripts_run().await - before;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("FIG {polls} scripts for {sent} messages in {seconds:.1} s");
    assert!(polls >= 10, "a message should cause a poll: {polls}");
    assert!((polls as f64) <= 10.0 * seconds, "{polls} in {seconds} s");
    let start = Stopwatch::start();
    guard.release().await.unwrap();
    let next = soon("the lock is granted", waiting).await.unwrap().unwrap();
    assert!(start.undisturbed() < Duration::from_secs(1), "{start:?}");
    next.release().await.unwrap();
    drop((holder, locks));
    server.assert_nothing_left().await;
}

/// Without its subscription, a waiter polls ten times a second, at its place in the queue. It must
/// not do so for the rest of its wait.
#[tokio::test(flavor = "multi_thread")]
async fn waiter_is_notified_again_at_its_place_once_the_client_is_subscribed_again() {
    let server = Server::start().await;
    let holder = server.locks().await.mutex("x").unwrap();
    let guard = holder.lock().await.unwrap();
    let client = Client::of(&server).await;
    let waiting = notified(&server, &client.locks).await;
    let entry = async || {
        let queue: Vec<String> = server.run(&["ZRANGE", QUEUE, "0", "0", "WITHSCORES"]).await;
        // Empty while the entry is replaced.
        let channel = queue.first().and_then(|entry| entry.split(' ').nth(3));
        (channel.is_some_and(|channel| !channel.is_empty()), queue.get(1).cloned())
    };
    let (has_channel, place) = entry().await;
    assert!(has_channel);
    client.messages.set_drops_requests(true);
    client.messages.cut();
    eventually("it polls", || async { entry().await == (false, place.clone()) }).await;
    client.messages.set_drops_requests(false);
    client.messages.cut();
    eventually("it is notified", || async { entry().await == (true, place.clone()) }).await;
    guard.release().await.unwrap();
    soon("the lock is granted", waiting).await.unwrap().unwrap().release().await.unwrap();
    client.end().await;
    drop(holder);
    server.assert_nothing_left().await;
}
